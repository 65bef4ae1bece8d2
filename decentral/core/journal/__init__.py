"""The journal of a peer: a file with one JSON line for each event."""
