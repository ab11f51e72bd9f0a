"""What the pages call the reader's own project."""
