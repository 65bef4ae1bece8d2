"""Copies of checkpoints and models outside of a swarm: `sending` uploads them, and `fetching` downloads whole ones."""
