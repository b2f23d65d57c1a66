"""The guard: what the judge says of many records, compared with golden files (tools/guard.py, tests/test_guard.py)."""
