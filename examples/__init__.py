"""Small, complete programs to copy from; `stabilizer demo` runs `lightning_gpt` or `accelerate_gpt`."""
