"""Canaries and shadows of adapters: split and counted at ingresses, judged by the manager."""
