"""Is the simulator right? A real run of `decentral.local` and a simulated one, compared by their journals, read alike.

    reference run (two equal peers) -> Device -> any other setting, simulated -> figures, beside the measured ones

Of the settings that are predicted nothing is measured beforehand: the device knows what one unthrottled peer needs for
a step and for a window's jobs, and what a question costs on this machine; all else follows from the setting.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from decentral.core import config
from decentral.core.ids import PeerId
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.virtual import Pace
from decentral.sim.geography import Earth, Wires
from decentral.sim.run import Unwatched
from decentral.sim.swarm import Shape, Swarm

Line = dict[str, Any]  # of a journal: docs/PROTOCOL.md
Journals = Sequence[Sequence[Line]]  # of a run's peers

JOIN_S = 10.0  # of virtual time in which everybody has surely joined
APART_S = 0.1  # between the starts of two newcomers
FASTEST_RATE = 1e10  # bytes/s: where larger answers took no longer than small ones
WIRE_S = 2e-4  # what sim/geography.py adds to a question and its answer


@dataclass(frozen=True, slots=True)
class Setting:
    """A run of decentral.local, as far as its command line tells."""

    name: str
    throttles: tuple[float, ...]
    window_s: Seconds
    micro_batch_s: Seconds  # emulated; 0: as long as it takes
    model: tuple[str, ...]  # overrides of the config that all settings share

    @property
    def overrides(self) -> list[str]:
        own = [f"gossip.window_s={self.window_s:g}", f"train.emulated_micro_batch_s={self.micro_batch_s:g}"]
        return [*self.model, *own]

    @property
    def config(self) -> config.Config:
        return config.load(None, self.overrides)

    @property
    def tokens_per_step(self) -> int:
        run = self.config
        assert run.train.micro_batch != "auto", "a setting says how large its micro-batches are"
        return run.train.micro_batch * run.train.accumulate * run.model.context


@dataclass(frozen=True, slots=True)
class Device:
    """What one unthrottled peer of the reference run needs."""

    beside_s: Seconds  # of a step, beside the emulated micro-batch: clipping, AdamW, and how late a sleep ends
    job_s: Seconds  # of each of a window's two jobs, closing and merging
    latency_s: Seconds  # of a question and its answer, without the blob
    rate: float  # bytes/s of the blob
    head_start_s: Seconds  # of the first peer, which trains while the others still start
    noise: float  # standard deviation of the steps between two lines, in steps

    def step_s(self, throttle: float, micro_batch_s: Seconds) -> Seconds:
        """train/step.py throttles the micro-batch, and nothing else."""
        return micro_batch_s * throttle + self.beside_s


@dataclass(frozen=True, slots=True)
class Figures:
    """What one peer did, per second of the measured time; of exchanges, those done."""

    tokens_per_s: float
    step_s: Seconds  # of computing, a window's jobs included
    busy: float
    exchanges_per_s: float
    exchange_s: Seconds  # mean
    exchange_bytes: float  # mean, both ways
    bytes_per_s: float


# Figures of a run


def figures(journals: Journals, warm_up_s: Seconds, seconds: Seconds) -> list[Figures]:
    """Of each peer, over `seconds` that begin `warm_up_s` after the last one has joined."""
    begins = max(line["t"] for lines in journals for line in lines if line["event"] == "joined") + warm_up_s
    return [_of_peer([line for line in lines if begins < line["t"] <= begins + seconds]) for lines in journals]


def _of_peer(lines: Sequence[Line]) -> Figures:
    """A step line tells what happened since the one before, so the first one only opens the time that counts."""
    steps = [line for line in lines if line["event"] == "step"]
    assert len(steps) > 1, "the measured time is too short for two step lines"
    since, until = steps[0]["t"], steps[-1]["t"]
    took_s, steps = until - since, steps[1:]
    done = [line for line in lines if line.get("outcome") == "done" and since < line["t"] <= until]
    moved = [line["sent_bytes"] + line["received_bytes"] for line in done]
    computed_s = sum(line["seconds"] for line in steps)
    return Figures(
        tokens_per_s=sum(line["tokens"] for line in steps) / took_s,
        step_s=computed_s / sum(line["micro_batches"] for line in steps),
        busy=computed_s / took_s,
        exchanges_per_s=len(done) / took_s,
        exchange_s=fmean(line["seconds"] for line in done) if done else 0.0,
        exchange_bytes=fmean(moved) if done else 0.0,
        bytes_per_s=sum(moved) / took_s,
    )


def swarm_of(peers: Sequence[Figures]) -> Figures:
    """Of all peers together: rates are sums, and means are over exchanges and over peers."""
    count = sum(one.exchanges_per_s for one in peers)
    weights = [one.exchanges_per_s / count if count else 0.0 for one in peers]
    return Figures(
        tokens_per_s=sum(one.tokens_per_s for one in peers),
        step_s=fmean(one.step_s for one in peers),
        busy=fmean(one.busy for one in peers),
        exchanges_per_s=count,
        exchange_s=sum(one.exchange_s * weight for one, weight in zip(peers, weights, strict=True)),
        exchange_bytes=sum(one.exchange_bytes * weight for one, weight in zip(peers, weights, strict=True)),
        bytes_per_s=sum(one.bytes_per_s for one in peers),
    )


# The device, from the reference run


def device_of(reference: Setting, journals: Journals) -> Device:
    """Of a run of unthrottled peers whose windows were short at first and longer later, so that their cost shows."""
    gossip = reference.config.gossip
    rows = [row for lines in journals for row in _step_rows(lines)]
    step_s, window_s = _least_squares([(float(steps), float(windows)) for steps, windows, _ in rows], rows)
    off = [(seconds - window_s * windows) / steps - step_s for steps, windows, seconds in rows]
    fresh_s = min(gossip.window_s, gossip.start_window_s) / 2
    latency_s, rate = _link((line for lines in journals for line in lines if line.get("outcome") == "done"), fresh_s)
    joined = sorted(line["t"] for lines in journals for line in lines if line["event"] == "joined")
    return Device(
        beside_s=step_s - reference.micro_batch_s,
        job_s=max(0.0, window_s / 2),
        latency_s=latency_s,
        rate=rate,
        head_start_s=joined[1] - joined[0] if len(joined) > 1 else 0.0,
        noise=float(np.std(off)) / step_s,
    )


def _step_rows(lines: Sequence[Line]) -> list[tuple[int, int, Seconds]]:
    """(steps, windows merged, seconds of computing) of each step line. Left out: those with other jobs in them."""
    merged = [line["t"] for line in _one_per_window(lines)]
    others = [line["t"] for line in lines if line["event"] in ("eval", "checkpoint", "joined", "peer_joined")]
    steps = [line for line in lines if line["event"] == "step"]
    rows = []
    for before, line in pairwise(steps):
        if _between(others, before["t"], line["t"]) == 0:
            rows.append((line["micro_batches"], _between(merged, before["t"], line["t"]), line["seconds"]))
    return rows


def _one_per_window(lines: Sequence[Line]) -> list[Line]:
    """A window with several partners writes a line for each, of one fragment and at one time."""
    first: dict[tuple[int, float], Line] = {}
    for line in lines:
        if line["event"] == "exchange":
            first.setdefault((line["fragment"], line["t"]), line)
    return sorted(first.values(), key=lambda line: float(line["t"]))


def _between(sorted_times: Sequence[float], after: float, until: float) -> int:
    return bisect_right(sorted_times, until) - bisect_right(sorted_times, after)


def _least_squares(columns: Sequence[tuple[float, float]], rows: Sequence[tuple[int, int, Seconds]]) -> list[float]:
    solved = np.linalg.lstsq(np.array(columns), np.array([seconds for *_, seconds in rows]), rcond=None)[0]
    return [float(value) for value in solved]


def _link(done: Iterable[Line], fresh_s: Seconds) -> tuple[Seconds, float]:
    """Latency and rate, from the questions that were answered at once.

    Their snapshots are older than they are. A much older one was given to a question whose patience was over.
    """
    at_once = [
        (line["received_bytes"], line["seconds"])
        for line in done
        if line["seconds"] <= line["age_s"] <= line["seconds"] + fresh_s
    ]
    assert at_once, "no exchange of the reference run was answered at once"
    by_size: dict[int, list[Seconds]] = {}
    for size, seconds in at_once:
        by_size.setdefault(size >> 12, []).append(seconds)
    sizes = [(bucket + 0.5) * 4096 for bucket in by_size]
    if len(sizes) < 2:
        return median(seconds for _, seconds in at_once), FASTEST_RATE
    weights = [len(found) ** 0.5 for found in by_size.values()]
    slope, latency_s = np.polyfit(sizes, [fmean(found) for found in by_size.values()], 1, w=weights)
    rate = 1 / slope if slope > 1 / FASTEST_RATE else FASTEST_RATE
    return max(0.0, float(latency_s)), float(rate)


# The simulated run


def predict(setting: Setting, device: Device, warm_up_s: Seconds, seconds: Seconds) -> list[Figures]:
    """From the setting and the device alone."""
    paces = [device.step_s(throttle, setting.micro_batch_s) for throttle in setting.throttles]
    return figures(simulate(setting, device, paces, warm_up_s + seconds), warm_up_s, seconds)


def retell(setting: Setting, device: Device, journals: Journals, warm_up_s: Seconds, seconds: Seconds) -> list[Figures]:
    """With each peer's own step, as its journal has it."""
    measured = figures(journals, warm_up_s, seconds)
    windows_per_step = [_windows_per_step(lines) for lines in journals]
    pairs = zip(measured, windows_per_step, strict=True)
    paces = [max(1e-4, one.step_s - 2 * device.job_s * windows) for one, windows in pairs]
    return figures(simulate(setting, device, paces, warm_up_s + seconds), warm_up_s, seconds)


def _windows_per_step(lines: Sequence[Line]) -> float:
    rows = _step_rows(lines)
    return sum(windows for _, windows, _ in rows) / max(1, sum(steps for steps, _, _ in rows))


def simulate(setting: Setting, device: Device, step_s: Sequence[Seconds], seconds: Seconds) -> list[list[Line]]:
    """The journals of a run of `seconds` after everybody has joined, on peers whose steps take so long."""
    pace = Pace(step_s[0], device.noise, job_s=device.job_s, report_s=1.0)
    shape = Shape.of(setting.config, pace, [own / step_s[0] for own in step_s], setting.tokens_per_step)
    delay_s = max(0.0, device.latency_s - WIRE_S) / 2
    earth = Earth(0, Wires(delay_s, device.rate, device.rate, spread=0.0))
    swarm = Swarm(replace(shape, plain=False), 0, earth, Unwatched())
    journals: dict[PeerId, list[Line]] = {}

    def write(peer: PeerId, t: Seconds, line: Log) -> None:
        journals.setdefault(peer, []).append({"t": t, "event": line.event, **line.fields})

    swarm.journal = write
    members = [swarm.add() for _ in step_s]
    swarm.start(members[0])
    for member in members[1:]:
        swarm.agenda.run(device.head_start_s + APART_S * member.number)
        swarm.start(member)
    swarm.agenda.run(swarm.agenda.now + JOIN_S + seconds)
    return [journals[member.peer] for member in members]
