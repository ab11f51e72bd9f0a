"""What the callbacks cost, measured; `python -m benchmarks` runs all of it."""
