"""What `decentral.estimate` predicts of a swarm before it exists: speed, memory, traffic, days and price."""
