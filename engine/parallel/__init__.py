"""Tensor parallelism: one engine over several ranks, each with its part of base and adapters."""
