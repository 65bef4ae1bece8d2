"""The gossip algorithms: each module holds one update rule and its record, listed in decentral/core/algorithms.py."""
