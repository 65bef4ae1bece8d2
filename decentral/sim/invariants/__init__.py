"""Rules that a simulated swarm must keep under any faults, checked while it runs; start reading at `audit.py`."""
