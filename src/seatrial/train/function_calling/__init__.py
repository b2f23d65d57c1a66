"""Function calling: preprocess (glaive), or generate, the data; render it (template); score and evaluate answers."""
