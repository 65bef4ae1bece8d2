"""The live page: a web page that shows a swarm, with data from journals, a running peer, the DHT or the simulator."""
