"""What must hold in a simulated swarm whatever goes wrong, checked while it runs."""
