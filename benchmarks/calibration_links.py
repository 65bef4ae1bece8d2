"""Are the simulator's links right? Exchanges of a swarm in the lab, and of the same swarm simulated, pull by pull.

    a run's journals -> Pull, one for each snapshot that came -> Link: the medians of a pair and kind of exchange

A pull's seconds are those of the journal: from the question until the answer was there whole, slow start, queues, the
other side's encoding and the wait for its window's end included.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np
from scipy.stats import spearmanr

from benchmarks.calibration_model import LIGHT_TIMES, DevicePace, Journals, Setting, play, settings_of
from benchmarks.wan import description
from decentral.core.units import Seconds
from decentral.scheduler.shared import topology
from decentral.sim.geography import SwarmGeography
from decentral.sim.swarm import SimulatedSwarm

LEAST_PULLS = 5  # of a pair and kind: fewer have no median


@dataclass(frozen=True, slots=True)
class LabSetting:
    """A swarm of `benchmarks.wan --swarm`, and the links that it runs over."""

    setting: Setting
    topology: str
    per_region: int = 64
    rates: float = 1.0  # of the topology's

    def links(self) -> topology.Topology:
        """The peers that the lab takes, at these rates."""
        found = topology.load(self.topology)
        peers = description.first_of_each_region(found, self.per_region)
        grid, chosen = np.ix_(peers, peers), operator.itemgetter(*peers)
        return replace(
            found,
            ids=chosen(found.ids),
            regions=chosen(found.regions),
            devices=chosen(found.devices),
            memory_bytes=found.memory_bytes[peers],
            flops=found.flops[peers],
            delay_s=found.delay_s[grid],
            bandwidth=found.bandwidth[grid] * self.rates,
            up=found.up[peers] * self.rates,
            down=found.down[peers] * self.rates,
            loss=found.loss[grid],
        )

    def arguments(self, seconds: Seconds) -> list[str]:
        """Of benchmarks.wan, up to the flags for decentral.local."""
        where = ["--swarm", self.topology, "--peers-per-region", str(self.per_region), "--rates", f"{self.rates:g}"]
        return [*where, "--seconds", f"{seconds:g}"]


@dataclass(frozen=True, slots=True)
class Pull:
    """A snapshot that a peer has pulled from another; peers by their numbers."""

    peer: int
    partner: int
    whole: bool  # with slow weights
    seconds: Seconds
    bytes: int


def pulls_of(journals: Journals, warm_up_s: Seconds, seconds: Seconds) -> list[Pull]:
    """The pulls of `seconds` that begin `warm_up_s` after the last peer has joined."""
    begins = max(line["t"] for lines in journals for line in lines if line["event"] == "joined") + warm_up_s
    number = {lines[0]["peer"]: index for index, lines in enumerate(journals)}
    done = [
        (index, line)
        for index, lines in enumerate(journals)
        for line in lines
        if line.get("outcome") == "done" and begins < line["t"] <= begins + seconds
    ]
    light = min((line["received_bytes"] for _, line in done), default=0)
    return [
        Pull(
            index,
            number[line["partner"]],
            line["received_bytes"] >= LIGHT_TIMES * light,
            line["seconds"],
            line["received_bytes"],
        )
        for index, line in done
        if line["partner"] in number
    ]


def predict(
    lab: LabSetting, device: DevicePace, seed: int, warm_up_s: Seconds, seconds: Seconds
) -> list[Pull]:
    """The pulls of the same swarm, simulated over the same links."""
    paces = [device.step_s(throttle, lab.setting.micro_batch_s) for throttle in lab.setting.throttles]
    geography = SwarmGeography(seed, topology=lab.links())
    swarm = SimulatedSwarm(settings_of(lab.setting, device, paces), seed, geography)
    return pulls_of(play(swarm, len(paces), device.start_s, warm_up_s + seconds), warm_up_s, seconds)
