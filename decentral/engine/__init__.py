"""What computes on this peer's device: the training thread, its worker, the optimizers, and the checkpoint."""
