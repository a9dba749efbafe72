"""Adapters: reading a PEFT folder, the rank-row pool, per-step token-to-adapter mapping. No requests."""
