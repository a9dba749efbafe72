"""The metric families of every process and how they become Prometheus' text format."""
