"""Train one model together on unequal devices in different places, by asynchronous gossip."""

__version__ = "0.1.0"
