"""A whole swarm in virtual time: `python -m decentral.simulate`."""
