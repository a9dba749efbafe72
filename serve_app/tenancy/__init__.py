"""Callers of the API: keys, the rules that a key carries, their limits and their use."""
