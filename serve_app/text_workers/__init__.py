"""Worker processes for the text work of large requests, apart from the event loop."""
