"""Simulate a whole swarm in virtual time: `python -m decentral.simulate`. Start reading at `run.py`."""
