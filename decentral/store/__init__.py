"""Copies of checkpoints and models outside of a swarm: sent, believed only if whole, and begun from."""
