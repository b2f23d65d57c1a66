"""Function calling: preprocess (glaive) or generate data, chat template, scoring and evaluation."""
