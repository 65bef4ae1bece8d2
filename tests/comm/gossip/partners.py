"""A view of the swarm for exchange machines: the partners that a test names, and windows of ten seconds."""

from collections.abc import Sequence

from decentral.core.ids import PeerId
from decentral.core.units import Seconds


class Partners:
    """All that hold the fragment are asked. Subclasses draw, or measure, otherwise."""

    def __init__(self, peers: Sequence[PeerId] = (), window_s: Seconds = 10.0) -> None:
        self.peers, self.shortest_s = peers, window_s

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        return self.peers

    def holders(self, fragment: int) -> Sequence[PeerId]:
        return self.peers

    def tokens_per_s(self, peer: PeerId, fragment: int) -> float:
        return 0.0

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        return 5.0

    def window_s(self) -> Seconds:
        return self.shortest_s

    def is_thin(self, fragment: int, size: int) -> bool:
        return False

    def period_s(self, fragment: int, size: int) -> Seconds:
        return self.shortest_s
