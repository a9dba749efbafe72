"""The wire format of OpenAI's API: bodies in, engine parameters and response bytes out."""
