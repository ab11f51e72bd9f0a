"""What the callbacks cost, measured; `python benchmarks/gradient_statistics.py` runs it."""
