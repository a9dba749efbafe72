"""Tools that write a base: from a GGUF file, or with random weights."""
