"""MLflow: register, resolve names, verified local copies. No torch, no Ray."""
