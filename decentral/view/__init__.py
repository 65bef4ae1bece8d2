"""What people see of a swarm: the terminal, the live page, reports, pictures, metrics."""
