"""The life of one request inside an ingress, from its base's handle to its last token."""
