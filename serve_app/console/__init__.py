"""The console: the pages under /console for operators and users, and the cookie of their login."""
