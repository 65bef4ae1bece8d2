"""What windows, merges and checkpoints cost training, in one process and without a network.

Three phases of one training thread: alone; while each fragment ends a window every half second and merges a partner
with the same bytes; and while a checkpoint is written. Peers on a network do far fewer merges a second.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.scale import WARM_CALLS, Scale
from decentral.comm.codecs import blockwise
from decentral.comm.gossip.kernel_choice import best_kernels
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.data import corpora
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.fragment import copy_in
from decentral.engine.measure import measure as measured

WINDOW_S = 0.5
JOBS_S = 40.0  # the longest that windows or a checkpoint may stay under way after their phase
LEAST_STEPS = 3  # of a phase
POLL_S = 0.02
SAVED = "a checkpoint"
ALONE, WINDOWS, CHECKPOINT = "alone", "with windows", "with a checkpoint"


def measure(scale: Scale, notes: Notes, size: str) -> None:
    """Note the speed of training in each phase, and what each job takes."""
    kernels, reason = best_kernels(scale.computing.device, blockwise)
    notes.put("kernels", reason)
    run = scale.run(size)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        corpus = corpora.load(run.data, run.model)
        setup = ComputeSetup(run, PeerId("A"), corpus, blockwise, scale.computing, Path(folder), kernels=kernels)
        compute = Compute(setup)
        notes.put("fragments", len(compute.fragments))
        began = time.perf_counter()
        published = measured(compute.span.forward, run.model, scale.computing, compute.sequences)
        notes.put("published tokens/s", published.tokens_per_s)
        notes.put("measuring it, s", time.perf_counter() - began)
        for _ in range(WARM_CALLS):
            compute.step()
        scale.wait()
        for name, value in Conductor(compute, scale.gossip_s).conducted().items():
            notes.put(name, value)
        notes.put("copies of a fragment", copies(scale, compute))


@dataclass(slots=True)
class Conductor:
    """Gives a training thread its jobs, phase by phase, and notes its steps and what it answers."""

    compute: Compute
    phase_s: float
    phase: str = ALONE
    steps: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # by phase: when a step ended, its tokens
    costs: dict[str, list[float]] = field(default_factory=dict)  # by job, in seconds
    unmerged: set[int] = field(default_factory=set)  # fragments whose window is not merged yet
    failures: list[str] = field(default_factory=list)

    def conducted(self) -> dict[str, Any]:
        """Go through all phases. Return what each has shown."""
        director = threading.Thread(target=self._direct, daemon=True)
        director.start()
        self.compute.run(self._report)
        director.join()
        phases = {name: paces(ends) for name, ends in self.steps.items() if len(ends) > 1}
        jobs_s = {
            name: {"count": len(all_s), "mean_s": mean(all_s), "longest_s": max(all_s)}
            for name, all_s in self.costs.items()
        }
        return {**phases, **jobs_s, "failures": self.failures}

    def _direct(self) -> None:
        """Submit the jobs. The training thread ends after Finish, whatever has failed before."""
        self.compute.submit(jobs.Start(newcomer=False))
        time.sleep(self.phase_s)
        self._until(lambda: len(self.steps.get(ALONE, ())) >= LEAST_STEPS)
        self.phase = WINDOWS
        for seq in range(max(1, round(self.phase_s / WINDOW_S))):
            for fragment in range(len(self.compute.fragments)):
                if fragment not in self.unmerged:
                    self.unmerged.add(fragment)
                    self.compute.submit(jobs.CloseWindow(fragment, seq))
            time.sleep(min(WINDOW_S, self.phase_s))
        self._until(lambda: not self.unmerged and len(self.steps.get(WINDOWS, ())) >= LEAST_STEPS)
        self.phase = CHECKPOINT
        self.compute.submit(jobs.Save())
        self._until(lambda: bool(self.costs.get(SAVED)))
        self.compute.submit(jobs.Finish())

    def _until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that a slow device may not have done yet; not for long, nor after a failure."""
        deadline = time.monotonic() + JOBS_S
        while not happened() and not self.failures and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _report(self, outcome: jobs.Outcome) -> None:
        match outcome:
            case jobs.Stepped():
                self.steps.setdefault(self.phase, []).append((time.perf_counter(), outcome.tokens))
            case jobs.WindowClosed():
                self._note("closing a window", outcome.cost_s)
                partner = jobs.Contribution(PeerId("B"), max(1, outcome.tokens), outcome.layout, outcome.blob)
                self.compute.submit(jobs.Merge(outcome.fragment, outcome.seq, (partner,)))
            case jobs.Merged():
                self._note("merging", outcome.cost_s)
                self.unmerged.discard(outcome.fragment)
            case jobs.Saved():
                self._note(SAVED, outcome.cost_s)
            case jobs.JobFailed(job, reason):
                self.failures.append(f"{job}: {reason}")
            case jobs.SaveFailed(reason):
                self.failures.append(f"Save: {reason}")

    def _note(self, job: str, cost_s: float) -> None:
        self.costs.setdefault(job, []).append(cost_s)


def paces(ends: list[tuple[float, int]]) -> dict[str, float]:
    """Return the speed between the first and the last of these steps' ends, and the gaps between them."""
    gaps = [late[0] - early[0] for early, late in pairwise(ends)]
    tokens = sum(one[1] for one in ends[1:])
    return {
        "tokens_per_s": tokens / (ends[-1][0] - ends[0][0]),
        "median_gap_ms": 1e3 * median(gaps),
        "longest_gap_ms": 1e3 * max(gaps),
    }


def copies(scale: Scale, compute: Compute) -> dict[str, float]:
    """Return what a snapshot of the middle fragment and a correction to it take the training thread and the worker."""
    gossiped = compute.gossip.fragments[len(compute.gossip.fragments) // 2]
    scale.wait()
    began = time.perf_counter()
    arrive = gossiped.live.copy_out(gossiped.rule.buffer)
    taken = time.perf_counter()
    into = arrive()
    arrived = time.perf_counter()
    copy_in(into, scale.computing.device)
    back = time.perf_counter()
    return {
        "parameters": gossiped.live.fragment.parameters,
        "snapshot, training waits, ms": 1e3 * (taken - began),
        "snapshot, worker, ms": 1e3 * (arrived - taken),
        "correction, worker, ms": 1e3 * (back - arrived),
    }
