"""The virtual network of a simulated swarm: time, links, faults and a DHT; start reading at `virtual_network.py`."""
