"""The order in which waiting requests go to the engines of a base, and which are refused."""
