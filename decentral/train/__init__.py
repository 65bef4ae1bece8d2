"""The model, its data, one training step, and the numerics of gossip. The only floor that knows torch."""
