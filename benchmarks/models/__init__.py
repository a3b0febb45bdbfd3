"""Whole models with a library's own attention and with ours: `python -m benchmarks.models`."""
