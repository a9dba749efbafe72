"""One base model on one device: scheduler, paged KV cache, forward pass, sampling. No HTTP, Ray or MLflow."""
