"""The engine replica: a Serve deployment, the process of its engine, and its adapters."""
