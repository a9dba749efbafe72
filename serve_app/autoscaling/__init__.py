"""Decides the number of engine replicas of a base. The policy runs inside Serve's controller."""
