"""Every metric family, in Prometheus' text format."""
