"""A training thread without tensors, as unreliable as a real one: jobs take a while, and some are refused or fail.

It keeps the promises that a real one keeps (decentral/core/jobs.py): one outcome for each job, in their order, of the
executions that it was given. Whatever it may choose, chance chooses.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from decentral.core import jobs
from decentral.core.fragments import ActivationForms, Layout, Section
from decentral.core.ids import PeerId
from decentral.core.time_spent import TimeSpent
from decentral.core.units import Seconds
from decentral.scheduler.placement.evaluate import EvaluatePlans, PlansEvaluated

TOKENS = 8  # of a micro-batch
WINDOW = (Section("pseudo_gradient", "q4", 4, 2),)
SPARSE_WINDOW = (Section("pseudo_gradient", "q1", 4, 1),)
CODINGS = (*WINDOW, *SPARSE_WINDOW)
ON_REQUEST = tuple(Section(f"phi.{place}", "int8", 2, 2) for place in range(3))
STATE = (Section("theta", "int8", 6, 6), Section("moments", "q4", 4, 2))
HIDDEN = (Section("hidden", "bf16", 4, 8), Section("targets", "u16", 4, 8))
THIN_HIDDEN = (Section("hidden", "int8", 4, 6), HIDDEN[1])
FORMS = ActivationForms((HIDDEN, THIN_HIDDEN), (HIDDEN[:1], (Section("hidden", "q4", 4, 4),)))
BUSY_S = 0.05  # longest that a job takes, but for a few
FAILS = 0.05  # share of the jobs that may fail which do
STEP_S = 0.2  # between two steps of a peer that trains by itself


def blob_of(layout: Layout) -> bytes:
    """A blob of the layout's size."""
    return bytes(sum(section.size for section in layout))


@dataclass
class Device:
    chance: Random
    peer: PeerId
    layers: int  # of the model
    parameters: dict[int, int]  # of each fragment
    synchronous: bool = False
    inbox: deque[tuple[Seconds, Any]] = field(default_factory=deque)  # jobs, and when each is done
    training: bool = False
    executions: list[int] = field(default_factory=list)  # whose gradients are in the sum
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    steps: int = 0
    lr_step: int = 0
    number: int = 0  # of the last micro-batch drawn
    step_at: Seconds = 0.0

    def put(self, job: Any, now: Seconds) -> None:
        last = self.inbox[-1][0] if self.inbox else now
        takes_s = BUSY_S * self.chance.random() * (40 if self.chance.random() < 0.01 else 1)
        self.inbox.append((max(last, now) + takes_s, job))

    def done(self, now: Seconds) -> list[Any]:
        """The outcomes of the jobs that are done by now, one for each, and steps of its own."""
        found: list[Any] = []
        while self.inbox and self.inbox[0][0] <= now:
            outcome = self._do(self.inbox.popleft()[1])
            found += [] if outcome is None else [outcome]
        if self.training and not self.synchronous and now >= self.step_at:
            self.step_at = now + STEP_S
            found.append(self._stepped(TOKENS, 2.0, 1))
        return found

    def next_at(self, now: Seconds) -> Seconds | None:
        """When something is done next, if nothing is put in before."""
        times = [self.inbox[0][0]] if self.inbox else []
        return min([*times, max(now, self.step_at)] if self.training and not self.synchronous else times, default=None)

    def _fails(self) -> bool:
        return self.chance.random() < FAILS

    def _stepped(self, tokens: int, loss: float, micro_batches: int, taken: tuple[int, ...] = ()) -> jobs.Stepped:
        self.steps, self.lr_step = self.steps + 1, self.lr_step + 1
        spent = TimeSpent(training=0.1)
        return jobs.Stepped(self.steps, self.lr_step, tokens, loss, spent, micro_batches, taken)

    def _do(self, job: Any) -> Any:
        match job:
            case jobs.Draw() | jobs.Forward() | jobs.Backward() | jobs.Seal() | jobs.Apply():
                return self._do_stage(job)
            case jobs.Drop(slot):
                self.slots.pop(slot, None)
                return jobs.Forgotten()
            case jobs.Undo():
                if self._fails():
                    return jobs.Undone(job.local_id, False)
                self.executions.remove(job.local_id)
                return jobs.Undone(job.local_id, True)
            case jobs.Forget():
                return jobs.Forgotten()
            case jobs.Compare(local_id, gradients=gradients):
                alike = (jobs.Likeness(1.0, 1.0), jobs.UNLIKE)
                return jobs.Compared(local_id, tuple(self.chance.choice(alike) for _ in gradients[1:]))
            case jobs.CloseRound(round, executions):
                return self._close_round(round, executions)
            case jobs.Advance(tokens=tokens, loss=loss, micro_batches=own, sums=sums):
                refused = [(index, part.peer, "nan") for index, parts in sums for part in parts if self._fails()]
                return replace(self._stepped(tokens, loss, own), refused=tuple(refused))
            case EvaluatePlans(number, proposals=proposals):
                worth = tuple(self.chance.choice((0.0, 1e5, 1e6)) for _ in proposals)
                return PlansEvaluated(number, self.chance.choice((0.0, 1e5)), worth)
        return self._do_gossip(job)

    def _do_gossip(self, job: Any) -> Any:
        match job:
            case jobs.CloseWindow(fragment, seq):
                more = ON_REQUEST if self.chance.random() < 0.7 else ()
                layout = SPARSE_WINDOW if job.thin else WINDOW
                return jobs.WindowClosed(fragment, seq, 64, layout, blob_of(layout), more, CODINGS, 0.01)
            case jobs.Rest(fragment):
                return jobs.Rested(fragment)
            case jobs.EncodeSections(fragment, seq, names):
                made = tuple(section for section in ON_REQUEST if section.name in names)
                return jobs.SectionsEncoded(fragment, seq, made, blob_of(made), 0.01)
            case jobs.Merge(fragment, seq, parts):
                rejected = [part.peer for part in parts if self._fails()]
                used = tuple(part.peer for part in parts if part.peer not in rejected)
                return jobs.Merged(fragment, seq, used, tuple((peer, "nan") for peer in rejected), 0.01)
            case jobs.ExportState(fragment):
                return jobs.StateExported(fragment, *(((), b"") if self._fails() else (STATE, blob_of(STATE))))
            case jobs.ExportRetained(fragment):
                return jobs.RetainedExported(fragment, 5, *(((), b"") if self._fails() else (STATE, blob_of(STATE))))
            case jobs.RetainCopy(fragment, step=step):
                return jobs.RetainedChanged(fragment, *(((), "disk") if self._fails() else (((fragment, step),), "")))
            case jobs.DropCopy(fragment):
                return jobs.RetainedChanged(fragment, ())
            case jobs.ImportState(_, step):
                accepted = not self._fails()
                self.lr_step = max(self.lr_step, step) if accepted else self.lr_step
                return jobs.StateImported(accepted, "" if accepted else "nan")
            case jobs.SetClock(step):
                self.lr_step = max(self.lr_step, step)
                return jobs.ClockSet(self.lr_step)
            case jobs.ChangeSpan():
                return jobs.SpanChanged(False, "shape") if self._fails() else jobs.SpanChanged(True, retained=((0, 3),))
            case jobs.Start():
                self.training = True
                if self.synchronous:
                    self.executions = []  # their gradients belong to other weights
                return jobs.Started(self.lr_step)
            case jobs.Evaluate():
                return jobs.Evaluated(self.steps * TOKENS, 2.0, 0.01)
            case jobs.Save():
                return jobs.SaveFailed("disk") if self._fails() else jobs.Saved(self.steps, 1000, 0.01)
            case jobs.Finish():
                return None
        raise NotImplementedError(f"tests/fuzz/device.py has no outcome for {job}: add a case to `_do`")

    def _do_stage(self, job: Any) -> Any:
        match job:
            case jobs.Draw(local_id, last) | jobs.Forward(local_id, _, last):
                entering, gradient = FORMS.entering_over(job.thin), FORMS.gradient_over(job.thin)
                own = isinstance(job, jobs.Draw)
                self.number += own
                if not own and self._fails():
                    return jobs.ExecutionFailed(local_id, "nan")
                if last < self.layers:
                    return jobs.ForwardDone(local_id, self.number, 1, TOKENS, entering, blob_of(entering))
                self.executions.append(local_id)
                return jobs.BackwardDone(local_id, TOKENS, 1.0, gradient, blob_of(gradient), self.number if own else 0)
            case jobs.Backward(local_id):
                if self._fails():
                    return jobs.ExecutionFailed(local_id, "nan")
                self.executions.append(local_id)
                gradient = FORMS.gradient_over(job.thin)
                return jobs.BackwardDone(local_id, TOKENS, 0.0, gradient, blob_of(gradient))
            case jobs.Seal(ready, then, slot):
                sealed, self.executions = tuple(self.executions), []
                sound = not self._fails()
                if then is not None and sound and set(ready) == set(sealed):
                    return self._stepped(then.tokens, then.loss, then.micro_batches, sealed)
                self.slots[slot] = sealed
                return jobs.Sealed(sealed, slot, sound)
            case jobs.Apply(tokens, own, loss, slot):
                self.slots.pop(slot)
                return self._stepped(tokens, loss, own)

    def _close_round(self, round: int, executions: tuple[int, ...]) -> jobs.RoundClosed:
        inside, self.executions = tuple(self.executions), []
        if not inside or not set(inside) <= set(executions):
            return jobs.RoundClosed(round, inside, ())
        sums = []
        for fragment, count in self.parameters.items():
            layout = (Section("gradient", "fp32", count, 4 * count),)
            sums.append(jobs.WindowClosed(fragment, round, TOKENS * len(inside), layout, blob_of(layout)))
        return jobs.RoundClosed(round, inside, tuple(sums))
