"""Small, complete programs to copy from; `stabilizer demo` runs `lightning_gpt`."""
