"""The side stream: tokens and state from engine processes to ingresses, one TCP connection each."""
