"""Is the simulator right? A real run of `decentral.local` and a simulated one are compared by their journals.

    reference run (two equal peers) -> DevicePace -> any other setting, simulated -> figures, beside the measured ones

Nothing is measured beforehand in the settings that are predicted. DevicePace holds what one unthrottled peer needs for
a step and for its windows' jobs, and what a request costs on this machine; all else follows from the setting.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from decentral.core import config
from decentral.core.ids import PeerId
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.sim.host import Pace
from decentral.sim.network.geography import SwarmGeography, TypicalLink
from decentral.sim.swarm import SimulatedSwarm, SwarmSettings

Line = dict[str, Any]  # one line of a journal: docs/PROTOCOL.md
Journals = Sequence[Sequence[Line]]  # one journal for each peer of a run

JOIN_ALLOWANCE_S = 10.0  # virtual time in which every peer has surely joined
START_GAP_S = 0.1  # between the starts of two newcomers
FASTEST_RATE = 1e10  # bytes/s, which stands for: larger answers took no longer than small ones
JOB_S = 2e-4  # what a job takes that handles no bytes, such as the start
JOBS_OF_A_WINDOW = 2  # its close and its merge
LIGHT_TIMES = 1.5  # a snapshot with slow weights is three times as large as one without


@dataclass(frozen=True, slots=True)
class Setting:
    """A run of decentral.local, as its command line describes it."""

    name: str
    throttles: tuple[float, ...]
    window_s: Seconds
    micro_batch_s: Seconds  # emulated duration of a micro-batch; 0: as long as it takes
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
class DevicePace:
    """What one unthrottled peer of the reference run needs."""

    beside_s: Seconds  # a step beside its emulated micro-batch: clipping, AdamW, and how late a sleep ends
    job_bytes: float  # bytes/s of a window's jobs: encoding a snapshot, decoding and merging the partners'
    latency_s: Seconds  # a request and its answer, without the blob
    rate: float  # bytes/s of the blob
    start_s: Seconds  # the start of a newcomer, while the first peer trains; several at once share the machine
    noise: float  # standard deviation of the steps between two lines, in steps

    def step_s(self, throttle: float, micro_batch_s: Seconds) -> Seconds:
        """engine/step.py throttles the micro-batch, and nothing else."""
        return micro_batch_s * throttle + self.beside_s


@dataclass(frozen=True, slots=True)
class Figures:
    """What one peer did, per second of the measured time. Only exchanges that were done count."""

    tokens_per_s: float
    step_s: Seconds  # computing time of a step, a window's jobs included
    busy: float
    exchanges_per_s: float
    exchange_s: Seconds  # mean
    exchange_bytes: float  # mean, both ways
    bytes_per_s: float


# What a run did


def figures(journals: Journals, warm_up_s: Seconds, seconds: Seconds) -> list[Figures]:
    """The figures of each peer, over `seconds` that begin `warm_up_s` after the last one has joined."""
    begins = max(line["t"] for lines in journals for line in lines if line["event"] == "joined") + warm_up_s
    return [_figures_of_peer([line for line in lines if begins < line["t"] <= begins + seconds]) for lines in journals]


def _figures_of_peer(lines: Sequence[Line]) -> Figures:
    """A step line tells what happened since the one before, so the first one only begins the time that counts."""
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


def swarm_figures(peers: Sequence[Figures]) -> Figures:
    """The figures of all peers together: rates are sums, and means are over exchanges and over peers."""
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


def device_of(reference: Setting, journals: Journals) -> DevicePace:
    """The pace of the device that ran the reference, unthrottled. Raises AssertionError where no exchange was quick."""
    gossip = reference.config.gossip
    rows = [row for lines in journals for row in _step_rows(lines)]
    step_s = sum(row.training_s for row in rows) / sum(row.steps for row in rows)
    byte_s = max(0.0, sum(row.gossip_s for row in rows)) / max(1.0, sum(row.handled for row in rows))
    errors = [row.training_s / row.steps - step_s for row in rows]
    fresh_s = min(gossip.window_s, gossip.start_window_s) / 2
    latency_s, rate = _link((line for lines in journals for line in lines if line.get("outcome") == "done"), fresh_s)
    joined = sorted(line["t"] for lines in journals for line in lines if line["event"] == "joined")
    return DevicePace(
        beside_s=step_s - reference.micro_batch_s,
        job_bytes=1 / max(byte_s, 1 / FASTEST_RATE),
        latency_s=latency_s,
        rate=rate,
        start_s=(joined[-1] - joined[0]) / max(1, len(joined) - 1),
        noise=float(np.std(errors)) / step_s,
    )


@dataclass(frozen=True, slots=True)
class StepRow:
    """What a step line tells of the training thread."""

    steps: int
    handled: float  # bytes, by jobs of gossip
    training_s: Seconds
    gossip_s: Seconds  # without what jobs take however few bytes they handle


def _step_rows(lines: Sequence[Line]) -> list[StepRow]:
    """The step lines, without those in whose time a newcomer joined: exchanges do not tell all that happened then."""
    others = [line["t"] for line in lines if line["event"] in ("joined", "peer_joined")]
    exchanges = [line for line in lines if line["event"] == "exchange"]
    received = [line["received_bytes"] for line in exchanges if line["outcome"] == "done"]
    light = min(received, default=0)  # a partner's pseudo-gradient, without slow weights, is as large as ours
    windows = sorted({(line["t"], line["fragment"]) for line in exchanges})  # a window has one line for each partner
    handled = [(t, light) for t, _ in windows] + [(line["t"], line["received_bytes"]) for line in exchanges]
    handled.sort()
    times, totals = [t for t, _ in handled], [0, *accumulate(size for _, size in handled)]
    rows = []
    for before, line in pairwise(line for line in lines if line["event"] == "step"):
        since, until = before["t"], line["t"]
        if bisect_right(others, until) == bisect_right(others, since):
            handled_bytes = totals[bisect_right(times, until)] - totals[bisect_right(times, since)]
            ended = sum(since < t <= until for t, _ in windows)
            gossip_s = line["aside"].get("gossip", 0.0) - JOBS_OF_A_WINDOW * JOB_S * ended
            rows.append(StepRow(line["micro_batches"], float(handled_bytes), line["seconds"], gossip_s))
    return rows


def _link(done: Iterable[Line], fresh_s: Seconds) -> tuple[Seconds, float]:
    """Latency and rate, from the requests that were answered at once.

    The snapshot that answers such a request is older than the request. A much older one answers a request that had
    been held until its patience was over. Slow weights are left out: the partner had to encode them first.
    """
    lines = list(done)
    light: dict[int, int] = {}
    for line in lines:
        light[line["fragment"]] = min(light.get(line["fragment"], line["received_bytes"]), line["received_bytes"])
    at_once = [
        (line["received_bytes"], line["seconds"])
        for line in lines
        if line["seconds"] <= line["age_s"] <= line["seconds"] + fresh_s
        if line["received_bytes"] < LIGHT_TIMES * light[line["fragment"]]
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


def predict(setting: Setting, device: DevicePace, warm_up_s: Seconds, seconds: Seconds) -> list[Figures]:
    """The figures of a setting, from the setting and the device alone."""
    paces = [device.step_s(throttle, setting.micro_batch_s) for throttle in setting.throttles]
    return figures(simulate(setting, device, paces, warm_up_s + seconds), warm_up_s, seconds)


def replay(
    setting: Setting, device: DevicePace, journals: Journals, warm_up_s: Seconds, seconds: Seconds
) -> list[Figures]:
    """The figures of a setting that was measured, simulated with each peer's own step as its journal has it."""
    measured = figures(journals, warm_up_s, seconds)
    jobs_s = [_bytes_per_step(lines) / device.job_bytes for lines in journals]
    paces = [max(1e-4, one.step_s - own_s) for one, own_s in zip(measured, jobs_s, strict=True)]
    return figures(simulate(setting, device, paces, warm_up_s + seconds), warm_up_s, seconds)


def _bytes_per_step(lines: Sequence[Line]) -> float:
    rows = _step_rows(lines)
    return sum(row.handled for row in rows) / max(1, sum(row.steps for row in rows))


def simulate(setting: Setting, device: DevicePace, step_s: Sequence[Seconds], seconds: Seconds) -> list[list[Line]]:
    """The journals of a run of `seconds` after everybody has joined, on peers whose steps take so long."""
    settings = settings_of(setting, device, step_s)
    link = TypicalLink(0.0, device.rate, device.rate, spread=0.0)  # loopback: what a question takes, processes take
    geography = SwarmGeography(0, link, processing_s=device.latency_s / 2)
    return play(SimulatedSwarm(settings, 0, geography), len(step_s), device.start_s, seconds)


def settings_of(setting: Setting, device: DevicePace, step_s: Sequence[Seconds]) -> SwarmSettings:
    """Of a swarm on such devices, without numbers in its blobs: times and sizes are all that is asked for."""
    pace = Pace(step_s[0], device.noise, JOB_S, device.job_bytes, report_s=1.0)
    settings = SwarmSettings.of(setting.config, pace, [own / step_s[0] for own in step_s], setting.tokens_per_step)
    return replace(settings, unquantised=True)


def play(swarm: SimulatedSwarm, peers: int, start_s: Seconds, seconds: Seconds) -> list[list[Line]]:
    """The journals of a simulated swarm: the first peer starts it, the others join it all at once.

    Their starts take `start_s` for each of them. A journal begins with its peer's name, as a real one does.
    """
    members = [swarm.add() for _ in range(peers)]
    journals = {member.peer: [Line(t=0.0, event="started", peer=member.peer)] for member in members}

    def write(peer: PeerId, t: Seconds, line: Log) -> None:
        journals[peer].append(JOURNAL_LINES.line(t, line.event))

    swarm.listen(write)
    swarm.start(members[0])
    for member in members[1:]:
        swarm.agenda.run(start_s * (peers - 1) + START_GAP_S * member.number)
        swarm.start(member)
    swarm.agenda.run(swarm.agenda.now + JOIN_ALLOWANCE_S + seconds)
    return list(journals.values())
