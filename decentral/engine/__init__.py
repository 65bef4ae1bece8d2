"""Computation on this peer's device: the training thread and its worker, the optimizers, and the checkpoint."""
