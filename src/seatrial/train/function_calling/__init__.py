"""Training a model to call functions: rows (from a data set or generated), chat template, scores and evaluation."""
