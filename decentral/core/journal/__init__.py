"""The journal: a line for each event of a peer."""
