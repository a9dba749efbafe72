"""The manager process: it makes the fleet of base applications match the registry."""
