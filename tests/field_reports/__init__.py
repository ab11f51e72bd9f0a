"""Situations from public bug reports, each a test named after its id; see README.md."""
