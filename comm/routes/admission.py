"""Admission: which executions this peer takes, and why it refuses others.

Memory is counted in what an execution's activations take, as parts of an execution through the whole span
(StageConfig.memory_share). An execution that is held has given its activations back: only its answer is kept.
"""

from dataclasses import dataclass

from decentral.comm.routes.execution import HELD
from decentral.comm.routes.execution_table import ExecutionTable
from decentral.comm.routes.forwarding import MIN_PATIENCE_S, Forwarding
from decentral.comm.routes.pacing import MicroBatchWindow
from decentral.comm.routes.stage import StageConfig
from decentral.comm.wire.messages import ExecutionId, ForwardRequest, Load, Offer, Refused
from decentral.core.jobs import MOST_UNDER_WAY
from decentral.core.reasons import Reason

MOST_HELD = 4  # times the micro-batches that the memory takes: executions, with those whose backward pass is done
KEPT_PART = 8  # one part in so many of the memory is kept for executions that enter at later layers
ROUNDING = 1e-6  # of sums of parts of the memory


@dataclass(slots=True)
class Admission:
    stage: StageConfig
    table: ExecutionTable
    forwarding: Forwarding
    window: MicroBatchWindow
    active: bool = False  # this peer trains
    draining: bool = False  # no new executions: those that are here are brought to their end
    round: int = 0  # of synchronous training

    def refusal(self, request: ForwardRequest, blob_bytes: int) -> Reason | None:
        """Why this execution is not taken; None: it is."""
        stage = self.stage
        if not self.active:
            return Reason.NOT_READY
        if ExecutionId(request.origin, request.number, request.first) in self.table.counted:
            return Reason.COUNTED  # an old question that was delayed: a later one has been answered long ago
        size = stage.size(request)
        if size == 0 or request.origin == stage.peer:
            return Reason.SPAN
        if request.layout != stage.layout(request.first, request.sequences) or blob_bytes != size:
            return Reason.SHAPE
        if request.patience_s < MIN_PATIENCE_S or request.round < self.round:
            return Reason.LATE
        if request.round > self.round + 1:
            return Reason.NOT_READY
        return None if self.has_memory(request.first) and not self.draining else Reason.BUSY

    def answer(self, offer: Offer) -> Load | Refused:
        """How soon this peer would be through with one more execution."""
        if not self.active or self.draining:
            return Refused(Reason.NOT_READY)
        if not self.stage.begins(offer.first):
            return Refused(Reason.SPAN)
        if not self.has_memory(offer.first):
            return Refused(Reason.BUSY)
        last = self.forwarding.usual_end(offer.first)
        load = self.forwarding.load
        wait_s = load.wait_s(self.table.by_token.values())
        return Load(self.stage.run, wait_s, load.execution_s(offer.first, last), last)

    def may_begin(self, own: int) -> bool:
        """Whether a micro-batch of our own may begin while so many are under way: the compute thread has time for it,
        and no gradients wait for a step."""
        return not self.table.jobs.full and self.has_memory(0) and own < self.window.size and not self.table.step_waits

    def has_memory(self, first: int) -> bool:
        """Whether there is memory for an execution that enters at this layer.

        The memory of one execution is kept for each later layer at which executions may enter (buffer classes: Merlin
        and Schweitzer, 1980). Else peers that hold the same layers could fill each other with executions that wait for
        one another.
        """
        capacity, count, in_use, own_count, own = self.stage.capacity, 0, 0.0, 0, 0.0
        for execution in self.table.by_token.values():
            if execution.state is not HELD:
                count, in_use = count + 1, in_use + execution.memory_share
                if execution.own:
                    own_count, own = own_count + 1, own + execution.memory_share
        more = self.stage.memory_share(first, self.stage.last)
        if count >= MOST_UNDER_WAY or len(self.table.by_token) >= MOST_HELD * capacity:
            return False
        if in_use + more > capacity + ROUNDING:
            return False
        kept = min(self.stage.later_entries(first), capacity // KEPT_PART)
        most = capacity - kept + ROUNDING
        if self.stage.first > 0:
            return in_use + more <= most
        if first == 0:
            return own + more <= most
        usual = own / own_count if own_count else 1.0
        wanted = min(self.window.size * usual, capacity - kept) - own  # no other peer can begin our micro-batches
        others = in_use - own + more
        return others <= capacity // KEPT_PART + ROUNDING or others + own + wanted <= capacity + ROUNDING
