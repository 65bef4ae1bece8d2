"""Show a swarm to people: the terminal, the live page, reports, pictures and metrics."""
