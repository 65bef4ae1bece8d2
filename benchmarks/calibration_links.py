"""Are the simulator's links right? A swarm in the lab and the same one simulated are compared pull by pull.

    a run's journals -> Pull, one for each snapshot that came -> medians of a pair and kind -> Agreement

A pull's seconds are those of its journal line: from the question until the answer was there whole. Slow start, queues,
the partner's encoding of slow weights and the wait for the end of its window are all in them.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from scipy.stats import spearmanr

from benchmarks.calibration_model import LIGHT_TIMES, DevicePace, Journals, Setting, play, settings_of
from benchmarks.wan import description
from decentral.core.units import Seconds
from decentral.scheduler.topology.topology import Topology, among, load
from decentral.sim.network.geography import SwarmGeography
from decentral.sim.swarm import SimulatedSwarm

LEAST_PULLS = 5  # of a pair and kind, in the lab: fewer have no median


@dataclass(frozen=True, slots=True)
class LabSetting:
    """A swarm, and the links that it runs over."""

    setting: Setting
    topology: str
    per_region: int = 64  # the lab takes the first peers of each region
    rates: float = 1.0  # of the topology's

    def links(self) -> Topology:
        """Of the peers that the lab takes, at these rates."""
        whole = load(self.topology)
        found = among(whole, description.first_of_each_region(whole, self.per_region))
        links = found.links._replace(bandwidth=found.bandwidth * self.rates)
        return replace(found, links=links, up=found.up * self.rates, down=found.down * self.rates)


@dataclass(frozen=True, slots=True)
class Pull:
    """A snapshot that a peer has pulled from another. Peers by their numbers."""

    peer: int
    partner: int
    whole: bool  # with slow weights
    seconds: Seconds
    bytes: int


@dataclass(frozen=True, slots=True)
class Compared:
    """What a setting's peers pulled in the lab, and in so many simulated runs."""

    lab: LabSetting
    measured: Sequence[Pull]
    predicted: Sequence[Pull]
    runs: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of figures that were measured, and what was predicted of each."""

    count: int
    rank_correlation: float  # Spearman's
    median_error: float  # relative to what was measured
    bias: float  # the median of the relative errors with their signs


def pulls_of(journals: Journals, warm_up_s: Seconds, seconds: Seconds) -> list[Pull]:
    """The pulls of `seconds` that begin `warm_up_s` after the last peer has joined."""
    begins = max(line["t"] for lines in journals for line in lines if line["event"] == "joined") + warm_up_s
    numbers = {lines[0]["peer"]: number for number, lines in enumerate(journals)}
    done = [
        (number, line)
        for number, lines in enumerate(journals)
        for line in lines
        if line.get("outcome") == "done" and begins < line["t"] <= begins + seconds
    ]
    light = min((line["received_bytes"] for _, line in done), default=0)
    return [
        Pull(number, numbers[line["partner"]], size >= LIGHT_TIMES * light, line["seconds"], size)
        for number, line in done
        for size in [line["received_bytes"]]
    ]


def predict(lab: LabSetting, device: DevicePace, seed: int, warm_up_s: Seconds, seconds: Seconds) -> list[Pull]:
    """The pulls of the same swarm, simulated over the same links."""
    paces = [device.step_s(throttle, lab.setting.micro_batch_s) for throttle in lab.setting.throttles]
    geography = SwarmGeography(seed, topology=lab.links(), processing_s=device.latency_s / 2)
    swarm = SimulatedSwarm(settings_of(lab.setting, device, paces), seed, geography)
    return pulls_of(play(swarm, len(paces), device.start_s, warm_up_s + seconds), warm_up_s, seconds)


def exchange_seconds(compared: Sequence[Compared]) -> Agreement:
    """Median seconds of the pulls of each setting and kind."""
    return _agreement([pair for one in compared for pair in medians(one, _kind)])


def pair_seconds(compared: Sequence[Compared]) -> Agreement:
    """Median seconds of the pulls of each pair, there and back apart, and kind."""
    return _agreement([pair for one in compared for pair in medians(one, _pair_and_kind)])


def exchange_bytes(compared: Sequence[Compared]) -> Agreement:
    """Bytes that all peers of a setting pulled."""
    return _agreement([(pulled(one.measured), pulled(one.predicted) / one.runs) for one in compared])


def medians(one: Compared, group: Callable[[Pull], Hashable]) -> list[tuple[Seconds, Seconds]]:
    """Of each group of pulls that is large enough: median seconds, measured and predicted."""
    measured, predicted = _grouped(one.measured, group), _grouped(one.predicted, group)
    return [
        (median(measured[key]), median(predicted[key]))
        for key in measured
        if len(measured[key]) >= LEAST_PULLS and predicted[key]
    ]


def of_kind(pulls: Sequence[Pull], whole: bool) -> list[Seconds]:
    return [pull.seconds for pull in pulls if pull.whole is whole]


def pulled(pulls: Sequence[Pull]) -> int:
    return sum(pull.bytes for pull in pulls)


def _kind(pull: Pull) -> Hashable:
    return pull.whole


def _pair_and_kind(pull: Pull) -> Hashable:
    return pull.peer, pull.partner, pull.whole


def _grouped(pulls: Sequence[Pull], group: Callable[[Pull], Hashable]) -> defaultdict[Hashable, list[Seconds]]:
    found: defaultdict[Hashable, list[Seconds]] = defaultdict(list)
    for pull in pulls:
        found[group(pull)].append(pull.seconds)
    return found


def _agreement(pairs: Sequence[tuple[float, float]]) -> Agreement:
    measured, predicted = zip(*pairs, strict=True)
    errors = [said / real - 1 for real, said in pairs]
    rank = float(spearmanr(measured, predicted).statistic)
    return Agreement(len(pairs), rank, median(map(abs, errors)), median(errors))
