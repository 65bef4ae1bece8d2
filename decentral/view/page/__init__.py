"""The live page: a swarm as a person wants to see it, in a browser, from journals, a peer, a visit or the simulator."""
