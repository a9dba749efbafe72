"""One base model on one device: scheduler, paged KV, forward pass, sampling. No HTTP, no Ray."""
