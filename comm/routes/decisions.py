"""What other peers are to be told of executions: that they count, or that nobody waits for them.

It is gathered for each peer, and goes out one question at a time: what comes up meanwhile travels with the next. What
is never told costs the other one a question of its own (comm/routes/in_doubt.py).
"""

from dataclasses import dataclass, field

from decentral.comm.routes.tags import CommitDecisionTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_EXECUTIONS, CommitDecision, ExecutionId
from decentral.comm.wire.transport import Ask
from decentral.core.ids import PeerId, RunId
from decentral.core.units import Seconds

COMMIT_DECISION_S: Seconds = 5.0  # deadline of a CommitDecision
DECISIONS_KEPT = 4096  # executions of either kind that wait for one peer; older ones run out of time there


@dataclass(slots=True)
class DecisionOutbox:
    """For one peer."""

    count: list[ExecutionId] = field(default_factory=list)
    release: list[ExecutionId] = field(default_factory=list)
    asking: bool = False


@dataclass(slots=True)
class DecisionOutboxes:
    run: RunId
    boxes: dict[PeerId, DecisionOutbox] = field(default_factory=dict)

    def count(self, peer: PeerId, execution: ExecutionId) -> None:
        self._of(peer).count.append(execution)

    def release(self, peer: PeerId, execution: ExecutionId) -> None:
        self._of(peer).release.append(execution)

    def _of(self, peer: PeerId) -> DecisionOutbox:
        box = self.boxes.setdefault(peer, DecisionOutbox())
        del box.count[:-DECISIONS_KEPT], box.release[:-DECISIONS_KEPT]
        return box

    def told(self, peer: PeerId) -> None:
        """The question was answered, or failed."""
        self.boxes.setdefault(peer, DecisionOutbox()).asking = False

    def tell(self) -> list[Ask]:
        asks: list[Ask] = []
        for peer, box in list(self.boxes.items()):
            if box.asking:
                continue
            if not (box.count or box.release):
                del self.boxes[peer]
                continue
            told = CommitDecision(self.run, tuple(box.count[:MAX_EXECUTIONS]), tuple(box.release[:MAX_EXECUTIONS]))
            del box.count[:MAX_EXECUTIONS], box.release[:MAX_EXECUTIONS]
            box.asking = True
            asks.append(Ask(CommitDecisionTag(), peer, Envelope(told), COMMIT_DECISION_S))
        return asks


__all__ = ["DecisionOutbox", "DecisionOutboxes"]
