"""What other peers are told of executions: that they are committed, or aborted.

Decisions are gathered for each peer, and go out one question at a time: what comes up meanwhile travels with the next.
A peer that is never told asks by itself (comm/routes/in_doubt.py).
"""

from dataclasses import dataclass, field

from decentral.comm.routes.tags import CommitDecisionTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_EXECUTIONS, CommitDecision, ExecutionId
from decentral.comm.wire.transport import Ask
from decentral.core.ids import PeerId, RunId
from decentral.core.units import Seconds

COMMIT_DECISION_S: Seconds = 5.0  # deadline of a CommitDecision
DECISIONS_KEPT = 4096  # decisions of either kind that wait for one peer; older ones run out of time there


@dataclass(slots=True)
class DecisionOutbox:
    """The decisions that one peer has not been told yet."""

    commit: list[ExecutionId] = field(default_factory=list)
    abort: list[ExecutionId] = field(default_factory=list)
    asking: bool = False


@dataclass(slots=True)
class DecisionOutboxes:
    run: RunId
    boxes: dict[PeerId, DecisionOutbox] = field(default_factory=dict)

    def commit(self, peer: PeerId, execution: ExecutionId) -> None:
        self._of(peer).commit.append(execution)

    def abort(self, peer: PeerId, execution: ExecutionId) -> None:
        self._of(peer).abort.append(execution)

    def _of(self, peer: PeerId) -> DecisionOutbox:
        box = self.boxes.setdefault(peer, DecisionOutbox())
        del box.commit[:-DECISIONS_KEPT], box.abort[:-DECISIONS_KEPT]
        return box

    def told(self, peer: PeerId) -> None:
        """The last question to this peer was answered, or failed."""
        self.boxes.setdefault(peer, DecisionOutbox()).asking = False

    def tell(self) -> list[Ask]:
        asks: list[Ask] = []
        for peer, box in list(self.boxes.items()):
            if box.asking:
                continue
            if not (box.commit or box.abort):
                del self.boxes[peer]
                continue
            told = CommitDecision(self.run, tuple(box.commit[:MAX_EXECUTIONS]), tuple(box.abort[:MAX_EXECUTIONS]))
            del box.commit[:MAX_EXECUTIONS], box.abort[:MAX_EXECUTIONS]
            box.asking = True
            asks.append(Ask(CommitDecisionTag(), peer, Envelope(told), COMMIT_DECISION_S))
        return asks


__all__ = ["DecisionOutboxes"]
