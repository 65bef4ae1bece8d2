"""What synchronous rounds (comm/rounds/round.py) change in routes: when a round begins and ends."""

from dataclasses import dataclass, field

from decentral.comm.routes.admission import Admission
from decentral.comm.routes.execution import FORWARD, GONE, HELD
from decentral.comm.routes.execution_table import ExecutionTable
from decentral.comm.routes.origin import OwnMicroBatches
from decentral.core.jobs import Forward
from decentral.core.machine import Effect
from decentral.core.reasons import Reason


@dataclass(slots=True)
class RoundControl:
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


__all__ = ["RoundControl"]
