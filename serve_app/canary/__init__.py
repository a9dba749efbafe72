"""Two versions of an adapter side by side: counted at ingresses, judged by the manager."""
