"""Function calling: rows (preprocessed or generated), chat template, scores and evaluation."""
