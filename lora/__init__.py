"""Adapters: reading a PEFT folder, the rank-row pool, the mapping of tokens to adapters."""
