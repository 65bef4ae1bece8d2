"""Where a peer's time goes, from its two threads to the summary: what is not training makes the busy fraction fall.

Time is a clock that a test moves on: a step takes a second of the training thread, and slow things as long as is said.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.outer_kernels import OuterVectors, TorchKernels, Weighted
from decentral.core import jobs
from decentral.core.config import SwarmConfig, TrainConfig
from decentral.core.ids import PeerId
from decentral.core.journal.file import Journal
from decentral.core.machine import Log
from decentral.engine import threads as job_phases
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.fragment import Live
from decentral.engine.step import TimeAccount
from decentral.peers.runtime.progress import TrainingProgress
from decentral.view import summary
from tests.journal_lines import event_of
from tests.patient_time import LIMIT_S

MakeSetup = Callable[..., ComputeSetup]
STEPS = 8
JOBS = STEPS - 2


class Clock:
    """The time of the thread that made it, and that of the other one, which work beside training takes."""

    def __init__(self) -> None:
        self.own, self.now, self.beside = threading.get_ident(), 0.0, 0.0

    def passes(self, seconds: float) -> None:
        if threading.get_ident() == self.own:
            self.now += seconds
        else:
            self.beside += seconds


class SlowCodecs:
    """The real codecs, and each encoding takes so long."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.decode, self.size = blockwise.decode, blockwise.size

    def encode(self, codec: str, values: Tensor) -> bytes:
        self.clock.passes(self.seconds)
        return blockwise.encode(codec, values)


class Timed:
    """A peer whose training thread is the test, its clock, and the jobs that come with each step."""

    def __init__(self, setup: ComputeSetup, monkeypatch: pytest.MonkeyPatch, slow_s: float = 0.0) -> None:
        self.clock = Clock()
        codecs = SlowCodecs(self.clock, slow_s)
        self.compute = Compute(ComputeSetup(setup.config, setup.peer, setup.corpus, codecs, setup.device, setup.folder))
        self.compute.counters.time = TimeAccount(lambda: self.clock.now)
        monkeypatch.setattr(job_phases.time, "thread_time", lambda: self.clock.beside)  # type: ignore[attr-defined]
        monkeypatch.setattr(self.compute, "batch", self._batch(self.compute.batch))
        self.steps: list[jobs.Stepped] = []

    def _batch(self, batch: Callable[[int], tuple[Tensor, Tensor]]) -> Callable[[int], tuple[Tensor, Tensor]]:
        def after_a_second(number: int) -> tuple[Tensor, Tensor]:
            self.clock.passes(1.0)
            return batch(number)

        return after_a_second

    def run(self, job_after: Callable[[int], jobs.Job], waits: bool = True) -> "Timed":
        """Trains STEPS steps; after each of the first JOBS comes a job.

        `waits`: after each step for what is beside, so that all of it is in the account. Nothing may be held then.
        """

        def report(outcome: jobs.Outcome) -> None:
            match outcome:
                case jobs.Stepped():
                    self.steps.append(outcome)
                    if len(self.steps) <= JOBS:
                        self.compute.submit(job_after(len(self.steps)))
                    if waits:
                        self._wait_for_the_worker()
                    if len(self.steps) == STEPS:
                        self.compute.submit(jobs.Finish())

        self.compute.submit(jobs.Start(newcomer=False))
        self.compute.run(report)
        return self

    def _wait_for_the_worker(self) -> None:
        """Until what is beside now is done, so that its time is in the next step's account."""
        done = threading.Event()

        def program(job: jobs.Job) -> job_phases.Program:
            yield job_phases.Phase.BESIDE
            done.set()
            return jobs.Forgotten()

        threads = self.compute.threads
        usual, threads._program_of = threads._program_of, program
        threads.submit(jobs.Forget(()))
        threads._program_of = usual
        assert done.wait(LIMIT_S)

    def summary(self, folder: Path) -> dict[str, Any]:
        """What a summary says of this peer, from its journal's lines."""
        progress = TrainingProgress(TrainConfig(), SwarmConfig(), None)
        progress.begin(0.0, 0)
        journal = Journal(folder / "journal.jsonl", lambda: 0.0)
        journal.write(event_of("started", peer="A"))
        for number, step in enumerate(self.steps):
            for effect in [*progress.handle(step, float(number)), *progress.flush(float(number))]:
                assert isinstance(effect, Log)
                journal.write(effect.event)
        (peer,) = summary.summarise([folder], [1.0], 1.0)["peers"]
        return dict(peer)


def close_and_merge(step: int) -> jobs.Job:
    """A window in turn with its merge."""
    return jobs.CloseWindow(0, step) if step % 2 else jobs.Merge(0, step - 1, ())


def test_a_peer_that_only_trains_is_busy_all_the_time(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = Timed(setup_of(), monkeypatch).run(lambda step: jobs.Forget(())).summary(tmp_path)
    assert found["busy_fraction"] == 1.0
    assert sum(found["time_shares"].values()) == 1.0


def test_a_slow_codec_at_a_step_edge_makes_the_busy_fraction_fall(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By all-reduce a newcomer gets the live weights, which are encoded between two steps."""
    timed = Timed(setup_of(algorithm="allreduce"), monkeypatch, slow_s=3.0)
    found = timed.run(lambda step: jobs.ExportState(0)).summary(tmp_path)
    assert found["busy_fraction"] == pytest.approx(STEPS / (STEPS + 3 * JOBS), abs=1e-4)
    assert found["time_shares"]["state"] == pytest.approx(3 * JOBS / (STEPS + 3 * JOBS), abs=1e-4)


def test_a_slow_codec_beside_training_leaves_the_busy_fraction_and_shows_beside_it(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed = Timed(setup_of(), monkeypatch, slow_s=3.0)
    found = timed.run(close_and_merge).summary(tmp_path)
    assert found["busy_fraction"] == 1.0
    assert found["time_shares"]["beside"] == pytest.approx(3 * (JOBS // 2) / STEPS, abs=1e-4)


def test_a_slow_copy_of_the_weights_makes_the_busy_fraction_fall(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed, copy = Timed(setup_of(), monkeypatch), Live.copy_theta

    def slow(live: Live, into: Tensor) -> None:
        timed.clock.passes(1.0)
        copy(live, into)

    monkeypatch.setattr(Live, "copy_theta", slow)
    found, closes = timed.run(close_and_merge).summary(tmp_path), JOBS // 2
    assert found["busy_fraction"] == pytest.approx(STEPS / (STEPS + closes), abs=1e-4)
    assert found["time_shares"]["gossip"] == pytest.approx(closes / (STEPS + closes), abs=1e-4)


def test_all_shares_but_that_of_the_worker_add_up_to_one(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    some: list[jobs.Job] = [jobs.ExportState(0), jobs.CloseWindow(1, 1), jobs.Save(), jobs.SetClock(99)]
    timed = Timed(setup_of(), monkeypatch, slow_s=0.5)
    timed.run(lambda step: some[step % len(some)], waits=False)
    shares = timed.summary(tmp_path)["time_shares"]
    assert sum(share for name, share in shares.items() if name != "beside") == pytest.approx(1.0, abs=1e-3)
    assert sum(step.spent.total for step in timed.steps) <= timed.clock.now


# The threads of a peer that trains


class Waiting(TorchKernels):
    """The torch kernels, whose merge waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(blockwise)
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        rho: float,
    ) -> None:
        self.begun.set()
        assert self.may_go_on.wait(LIMIT_S)
        super().merge(vectors, pseudo_gradients, slow_weights, rho)


def test_training_goes_on_while_a_window_is_merged_and_the_correction_comes_between_two_steps(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, kernels = setup_of(), Waiting()
    compute = Compute(
        ComputeSetup(setup.config, setup.peer, setup.corpus, blockwise, setup.device, setup.folder, kernels=kernels)
    )
    theirs = _window_of(setup_of("B"))
    beside, added, stepping, step, add = [0], list[tuple[int, bool]](), [False], compute.step, Live.add

    def stepped() -> jobs.Stepped:
        stepping[0] = True
        found = step()
        stepping[0] = False
        return found

    def noted(live: Live, correction: Tensor) -> None:
        added.append((threading.get_ident(), stepping[0]))
        add(live, correction)

    def report(outcome: jobs.Outcome) -> None:
        match outcome:
            case jobs.WindowClosed():
                compute.submit(jobs.Merge(0, 1, (theirs,)))
            case jobs.Stepped() if kernels.begun.is_set() and not kernels.may_go_on.is_set():
                beside[0] += 1
                if beside[0] == 3:
                    kernels.may_go_on.set()
            case jobs.Merged(used=used):
                assert used == (PeerId("B"),)
                compute.submit(jobs.Finish())

    monkeypatch.setattr(compute, "step", stepped)
    monkeypatch.setattr(Live, "add", noted)
    compute.submit(jobs.Start(newcomer=False))
    compute.submit(jobs.CloseWindow(0, 1))
    compute.run(report)
    assert beside == [3]
    assert added == [(threading.get_ident(), False)]


def _window_of(setup: ComputeSetup) -> jobs.Contribution:
    peer = Compute(setup)
    peer.step()
    closed = peer.do(jobs.CloseWindow(0, 1))
    assert isinstance(closed, jobs.WindowClosed)
    return jobs.Contribution(setup.peer, closed.tokens, closed.layout, closed.blob)


def test_a_bug_in_a_kernel_ends_the_training_thread_with_that_error(setup_of: MakeSetup) -> None:
    class Broken(TorchKernels):
        def close(self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = "q4") -> tuple[bytes, float]:
            raise ZeroDivisionError("a bug")

    setup = setup_of()
    compute = Compute(
        ComputeSetup(
            setup.config, setup.peer, setup.corpus, blockwise, setup.device, setup.folder, kernels=Broken(blockwise)
        )
    )
    compute.submit(jobs.Start(newcomer=False))
    compute.submit(jobs.CloseWindow(0, 1))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        compute.run(lambda outcome: None)


def test_weights_that_have_diverged_are_a_failed_job_and_the_threads_go_on(setup_of: MakeSetup) -> None:
    compute, seen = Compute(setup_of()), list[jobs.Outcome]()

    def report(outcome: jobs.Outcome) -> None:
        seen.append(outcome)
        if isinstance(outcome, jobs.JobFailed):
            compute.submit(jobs.Finish())

    compute.gossip.of(0).live.theta.fill_(torch.nan)
    compute.submit(jobs.Start(newcomer=False))
    compute.submit(jobs.CloseWindow(0, 1))
    compute.run(report)
    (failed,) = (outcome for outcome in seen if isinstance(outcome, jobs.JobFailed))
    assert "diverged" in failed.reason
