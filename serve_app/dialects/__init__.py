"""The APIs /v1/responses and /v1/messages: bodies read as chats, and answers in their shapes."""
