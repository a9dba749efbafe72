"""The manager process: makes the applications of the bases on Serve match the registry."""
