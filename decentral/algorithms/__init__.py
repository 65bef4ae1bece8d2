"""The update rules of the gossip algorithms, one a module; their records are in decentral/core/choices.py."""
