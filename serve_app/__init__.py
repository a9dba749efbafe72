"""The front: HTTP, Ray Serve, YAML config, OpenAI's wire format, text and routing. No tensors."""
