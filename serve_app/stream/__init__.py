"""The side stream: tokens from engine processes to ingresses, one TCP connection each."""
