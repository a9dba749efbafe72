"""Adapters: reading a PEFT folder, the heap of rank rows, the mapping of tokens to adapters."""
