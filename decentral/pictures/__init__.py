"""Pictures of plans and of simulated runs, for people who did not make them. They need the extra `plot`."""
