"""The virtual network: time, links, faults and places of simulated swarms."""
