"""Our own micro-batches: how many are under way, and when the next one begins; in synchronous training, by rounds."""

from dataclasses import dataclass, field

from decentral.comm.routes.admission import Admission
from decentral.comm.routes.execution import FORWARD, GONE, HELD, OwnExecution
from decentral.comm.routes.execution_table import ExecutionTable
from decentral.comm.routes.forwarding import SUCCESSOR_RETRY_S, Forwarding
from decentral.comm.routes.pacing import budget_s
from decentral.comm.wire.messages import ExecutionId
from decentral.core.jobs import Draw, Forward
from decentral.core.machine import Effect
from decentral.core.reasons import Reason
from decentral.core.units import Seconds


@dataclass(slots=True)
class OwnMicroBatches:
    table: ExecutionTable
    admission: Admission
    forwarding: Forwarding
    quota: int | None = None  # micro-batches that may still begin; None: as many as the window allows
    look_at: Seconds | None = None  # when to see whether a peer holds the next layers

    def begin(self, now: Seconds) -> list[Effect]:
        """Begins as many micro-batches as the window allows, while the compute thread has nothing better to do."""
        jobs: list[Effect] = []
        self.look_at = None
        stage = self.admission.stage
        alone = stage.last == stage.layers and not stage.synchronous
        if not self.admission.active or self.admission.draining or stage.first > 0 or alone:
            return jobs
        own = sum(execution.own for execution in self.table.by_token.values())
        while self.quota != 0 and self.admission.may_begin(own):
            last = self.forwarding.end(0)
            if last < stage.layers and not self.forwarding.view.successors(last):
                self.look_at = now + SUCCESSOR_RETRY_S
                break
            execution = self._new(last, now)
            jobs.append(self.table.jobs.begin(Draw(execution.token, last)))
            own += 1
            self.quota = None if self.quota is None else self.quota - 1
        return jobs

    def _new(self, last: int, now: Seconds) -> OwnExecution:
        execution = OwnExecution(
            token=self.table.new_token(),
            id=ExecutionId(self.admission.stage.peer, 0, 0),
            last=last,
            memory_share=self.admission.stage.memory_share(0, last),
            started_at=now,
            until=now + budget_s(self.admission.window.typical_s),
            drawn=now,
            round=self.admission.round,
        )
        self.table.add(execution)
        return execution

    @property
    def under_way(self) -> list[OwnExecution]:
        own = (one for one in self.table.by_token.values() if isinstance(one, OwnExecution))
        return [execution for execution in own if execution.state is not GONE]

    def give_up_all(self) -> list[Effect]:
        """Gives up those under way, and begins none any more: no peers are left that could take them on."""
        self.quota = 0
        return [effect for execution in self.under_way for effect in self.table.give_up(execution, Reason.GONE)]


@dataclass(slots=True)
class RoundControl:
    """What synchronous rounds (comm/rounds/round.py) change in routes."""

    table: ExecutionTable
    admission: Admission
    own: OwnMicroBatches
    _early: list[Forward] = field(default_factory=list)  # forward passes of the next round

    def push(self, job: Forward, round: int) -> None:
        """The job waits for the compute thread, or, if it belongs to the next round, for that."""
        if round > self.admission.round:
            self._early.append(job)
        else:
            self.table.jobs.push(job)

    def begin(self, round: int, active: bool, quota: int) -> list[Effect]:
        """The weights are those of this round now. Micro-batches that came early belong to it."""
        self.admission.round, self.admission.active, self.own.quota = round, active, quota
        early, self._early = self._early, []
        effects: list[Effect] = []
        for job in early:
            execution = self.table.by_token.get(job.token)
            if execution is not None and execution.state is FORWARD and active:
                self.table.jobs.push(job)
            elif execution is not None:
                effects += self.table.give_up(execution, Reason.NOT_READY)
        return effects

    def end(self, everything: bool) -> list[Effect]:
        """Nothing more counts in this round: what is under way is given up. `everything`: also what came early."""
        effects: list[Effect] = []
        for execution in list(self.table.by_token.values()):
            if execution.state is GONE or (execution.round > self.admission.round and not everything):
                continue
            if execution.state is HELD:
                self.table.end_held(execution, "the round is over")
            else:
                effects += self.table.give_up(execution, Reason.LATE)
        return effects
