"""What the lab emulates: the links of N peers, their routers, and the size of a packet.

It is read from a topology file of the planner (scheduler/topology/topology_file.py): delays and rates of pairs, losses,
and each peer's uplink and downlink. What a topology has nothing to say about is told the lab: who is behind which kind
of router, and a factor for all rates, where a machine cannot carry them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.wan.nat import KINDS
from decentral.core.errors import UserError
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.arrays import Floats

MTU = 1500
MOST_PEERS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """Rates in bytes/s of IP packets (inf: unlimited), delays one way in seconds; rows send, columns receive."""

    names: tuple[str, ...]
    regions: tuple[str, ...]
    up: Floats  # N
    down: Floats  # N
    path: Floats  # N x N
    delay_s: Floats  # N x N
    loss: Floats  # N x N, a share of the packets
    nat: Mapping[int, str] = field(default_factory=dict)  # peers behind a router, and its kind
    mtu: int = MTU
    seed: int = 0

    def __len__(self) -> int:
        return len(self.names)

    def rate(self, source: int, target: int) -> float:
        """What one pair can carry while nobody else sends, in bytes/s."""
        return float(min(self.up[source], self.path[source, target], self.down[target]))

    def round_trip_s(self, source: int, target: int) -> float:
        return float(self.delay_s[source, target] + self.delay_s[target, source])

    def scaled(self, factor: float) -> "Description":
        """With all rates times a factor."""
        return replace(self, up=self.up * factor, down=self.down * factor, path=self.path * factor)

    def to_json(self) -> str:
        arrays = {name: getattr(self, name).tolist() for name in ("up", "down", "path", "delay_s", "loss")}
        others = {name: getattr(self, name) for name in ("names", "regions", "mtu", "seed")}
        return json.dumps({**arrays, **others, "nat": {str(peer): kind for peer, kind in self.nat.items()}})


def from_json(text: str) -> Description:
    """The description whose `to_json` this is."""
    tree: dict[str, Any] = json.loads(text)
    arrays = {name: np.array(tree[name], np.float64) for name in ("up", "down", "path", "delay_s", "loss")}
    nat = {int(peer): kind for peer, kind in tree["nat"].items()}
    return Description(
        names=tuple(tree["names"]),
        regions=tuple(tree["regions"]),
        nat=nat,
        mtu=tree["mtu"],
        seed=tree["seed"],
        **arrays,
    )


def from_topology(found: topology.Topology, peers: Sequence[int] | None = None) -> Description:
    """The links of these peers of a topology; None: of all. Raises UserError for more than MOST_PEERS, or one."""
    chosen = list(range(len(found)) if peers is None else peers)
    if not 2 <= len(chosen) <= MOST_PEERS:
        raise UserError(f"the lab takes 2 to {MOST_PEERS} peers; got {len(chosen)} (--peers-per-region takes fewer)")
    part = topology.among(found, chosen)
    return Description(
        names=part.ids,
        regions=part.regions,
        up=part.up,
        down=part.down,
        path=part.bandwidth,
        delay_s=part.delay_s,
        loss=part.loss,
    )


def first_of_each_region(found: topology.Topology, count: int) -> list[int]:
    """The first `count` peers of each region, in the order of the file."""
    seen: dict[str, int] = {}
    chosen = []
    for peer, region in enumerate(found.regions):
        seen[region] = seen.get(region, 0) + 1
        if seen[region] <= count:
            chosen.append(peer)
    return chosen


def parse_nat(text: str, peers: int) -> dict[int, str]:
    """Who is behind a router: `2,3` or `2:home,3:symmetric`. Raises UserError."""
    found = {}
    for part in filter(None, text.split(",")):
        number, _, kind = part.partition(":")
        if not number.isdecimal() or int(number) >= peers or (kind or "home") not in KINDS:
            kinds = " or ".join(KINDS)
            raise UserError(f"--nat expects numbers below {peers}, with {kinds}: 2:home,3:symmetric; got {part!r}")
        found[int(number)] = kind or "home"
    return found
