"""What other peers are to be told of legs: that they count, or that nobody waits for them.

It is gathered for each peer, and goes out one question at a time: what comes up meanwhile travels with the next. What
is never told costs the other one a question of its own (comm/doubt.py).
"""

from dataclasses import dataclass, field

from decentral.comm.codec import Envelope
from decentral.comm.messages import MAX_LEGS, LegId, Settle
from decentral.comm.transport import Ask
from decentral.core.ids import PeerId, RunId
from decentral.core.units import Seconds

SETTLE_S: Seconds = 5.0  # deadline of a Settle
KEPT = 4096  # legs of either kind that wait for one peer; older ones run out of time there


@dataclass(slots=True)
class Outbox:
    """For one peer."""

    count: list[LegId] = field(default_factory=list)
    release: list[LegId] = field(default_factory=list)
    asking: bool = False


@dataclass(slots=True)
class Outboxes:
    run: RunId
    boxes: dict[PeerId, Outbox] = field(default_factory=dict)

    def count(self, peer: PeerId, leg: LegId) -> None:
        self._of(peer).count.append(leg)

    def release(self, peer: PeerId, leg: LegId) -> None:
        self._of(peer).release.append(leg)

    def _of(self, peer: PeerId) -> Outbox:
        box = self.boxes.setdefault(peer, Outbox())
        del box.count[:-KEPT], box.release[:-KEPT]
        return box

    def told(self, peer: PeerId) -> None:
        """The question was answered, or failed."""
        self.boxes.setdefault(peer, Outbox()).asking = False

    def tell(self) -> list[Ask]:
        asks: list[Ask] = []
        for peer, box in list(self.boxes.items()):
            if box.asking:
                continue
            if not (box.count or box.release):
                del self.boxes[peer]
                continue
            told = Settle(self.run, tuple(box.count[:MAX_LEGS]), tuple(box.release[:MAX_LEGS]))
            del box.count[:MAX_LEGS], box.release[:MAX_LEGS]
            box.asking = True
            asks.append(Ask(("settle",), peer, Envelope(told), SETTLE_S))
        return asks


__all__ = ["Outbox", "Outboxes"]
