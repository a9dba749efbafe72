"""Where a request goes: what an ingress knows of each engine, the score, policies, the queue."""
