"""Comparison of two evaluations on the same tasks: `statistics.py` has the numbers, `evaluations.py` the files."""
