"""The engine replica: a Serve deployment around one engine process, and its adapters."""
