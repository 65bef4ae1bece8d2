"""By how much a plan has to be better before a swarm changes to it."""

MARGIN = 0.02  # a new plan must be better by this share before a peer changes to it


def adopts(current: float, proposed: float) -> bool:
    """Whether a peer that pays `current` seconds changes to a plan that its own evaluation puts at `proposed`."""
    return proposed < current * (1 - MARGIN)
