"""Describe a swarm's devices and links as arrays, read from a topology file (`load`) or from measured profiles.

topology_file.py shows the form of a file. A file uses the customary units (ms, Gb/s, GB, TFLOP/s); the arrays are in
seconds, bytes/s, bytes and FLOP/s. A peer's uplink and downlink rates limit each of its links, and all its links
together, and so do a site's rates for all links between its peers and other regions; `bandwidth` is the rate of a link
while all other links are idle.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decentral.core.errors import UserError
from decentral.core.layer_work import UNMEASURED, KindCosts
from decentral.core.near_names import listed
from decentral.core.strict_json import JsonFields
from decentral.scheduler.topology.arrays import Flags, Floats, Ints
from decentral.scheduler.topology.topology_file import (
    PeerForm,
    TopologyFile,
    WorkloadForm,
    find,
    read,
    require,
    validated,
)

MOST_TOPOLOGY_PEERS = 4096  # a file with more peers is refused, because each N x N array would take over 128 MiB
GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Workload:
    """The data that the peers send in one optimiser step of a synchronous pipeline (Yuan et al., arXiv 2206.01288).

    The replicas of a stage average `gradient_gbytes`, and in each pipeline a stage sends `activation_gbytes` to the
    next. If `stages` or `replicas` is None, both sizes are those of the whole model and the whole batch, and the
    planner (sync/degrees.py) divides the sizes when it searches for the numbers of stages and replicas. `tokens` are
    those of the whole batch; if None, they follow from the activations (sync/step_needs.py).
    """

    stages: int | None = 8
    replicas: int | None = 8
    gradient_gbytes: float = 0.65
    activation_gbytes: float = 0.47124928  # 62,500 tokens x 2,024 channels x 4 bytes, divided by 2**30
    tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """A link that all peers of a region share, for traffic between them and other regions."""

    region: str
    up: float  # bytes/s that the peers together send; inf: unlimited
    down: float  # bytes/s that the peers together receive; inf: unlimited


class LinkMatrices(NamedTuple):
    """The properties of links, each N x N: from the row's peer to the column's peer."""

    delay_s: Floats  # one way
    bandwidth: Floats  # bytes/s
    loss: Floats  # share of packets

    def among(self, peers: Sequence[int]) -> "LinkMatrices":
        """Return the links between the peers with these numbers, in this order."""
        return LinkMatrices._make(matrix[np.ix_(peers, peers)] for matrix in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProperty:
    """How a topology file gives one property of links."""

    key: str  # in LinkForm, and in TopologyFile as an N x N matrix
    times: float = 1.0  # the file's number is multiplied by this
    over: float = 1.0  # and divided by this
    above_zero: bool = False  # whether 0 is invalid
    below: float = np.inf
    to_itself: float = 0.0  # of a peer's link to itself
    inside: float = 0.0  # the file's number within a region that has one peer, and no link of its own

    @property
    def bounds(self) -> str:
        """Return which numbers are valid, as text."""
        least = "above 0" if self.above_zero else "at least 0"
        return least if self.below == np.inf else f"{least} and below {self.below:g}"

    def is_valid(self, values: Floats) -> Flags:
        """Return which of the file's numbers are valid."""
        return ((values > 0) if self.above_zero else (values >= 0)) & (values < self.below)

    def in_si(self, values: Floats) -> Floats:
        """Return the file's numbers in SI units."""
        return values * self.times / self.over


LINK_PROPERTIES = {  # one for each field of LinkMatrices, in the same order
    "delay_s": LinkProperty(key="delay_ms", over=1e3),
    "bandwidth": LinkProperty(key="bandwidth_gbps", times=GBIT, above_zero=True, to_itself=np.inf, inside=1.0),
    "loss": LinkProperty(key="loss", below=1.0),
}


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """N peers and the links between them. A peer has zero delay and infinite bandwidth to itself."""

    ids: tuple[str, ...]
    regions: tuple[str, ...]
    devices: tuple[str, ...]
    memory_bytes: Floats
    flops: Floats
    links: LinkMatrices
    up: Floats  # bytes/s that each peer sends to all others together; inf: unlimited
    down: Floats  # bytes/s that each peer receives from all others together; inf: unlimited
    workload: Workload | None = None
    sites: tuple[Site, ...] = ()
    costs: tuple[KindCosts, ...] = ()  # each peer's measured costs of the layers of one model; (): none is known

    @property
    def delay_s(self) -> Floats:
        """Return each link's delay in seconds, one way, (N, N)."""
        return self.links.delay_s

    @property
    def bandwidth(self) -> Floats:
        """Return each link's rate in bytes/s while all other links are idle, (N, N)."""
        return self.links.bandwidth

    @property
    def loss(self) -> Floats:
        """Return each link's share of packets lost, (N, N)."""
        return self.links.loss

    def __len__(self) -> int:
        """Return the number of peers."""
        return len(self.ids)

    def digest(self) -> str:
        """Return a hex digest of the peers and their links that is the same for any order of the peers and sites."""
        order = sorted(range(len(self)), key=self.ids.__getitem__)
        peers = [[self.ids[i], self.regions[i], self.devices[i]] for i in order]
        sites = sorted([site.region, site.up, site.down] for site in self.sites)
        costs = [self.costs[i] for i in order] if self.costs else []
        state = hashlib.blake2b(json.dumps([peers, sites, *costs]).encode(), digest_size=16)
        for vector in (self.memory_bytes, self.flops, self.up, self.down):
            state.update(np.ascontiguousarray(vector[order]).tobytes())
        for matrix in self.links:
            state.update(np.ascontiguousarray(matrix[np.ix_(order, order)]).tobytes())
        return state.hexdigest()


def regions_of(topology: Topology) -> Ints:
    """Return region_N: each peer's region as a number from 0, in order of first appearance."""
    number = {name: i for i, name in enumerate(dict.fromkeys(topology.regions))}
    return np.array([number[region] for region in topology.regions])


def sites_of(topology: Topology) -> Ints:
    """Return site_N: the index in `topology.sites` of each peer's site, or -1 if the peer's region has no site."""
    index = {site.region: i for i, site in enumerate(topology.sites)}
    return np.array([index.get(region, -1) for region in topology.regions])


def among(topology: Topology, peers: Sequence[int]) -> Topology:
    """Return the topology of the peers with these numbers only, in this order."""
    return replace(
        topology,
        ids=tuple(topology.ids[peer] for peer in peers),
        regions=tuple(topology.regions[peer] for peer in peers),
        devices=tuple(topology.devices[peer] for peer in peers),
        memory_bytes=topology.memory_bytes[peers],
        flops=topology.flops[peers],
        links=topology.links.among(peers),
        up=topology.up[peers],
        down=topology.down[peers],
        costs=tuple(topology.costs[peer] for peer in peers) if topology.costs else (),
    )


def load(path: str | Path) -> Topology:
    """Return the topology in the YAML or JSON file `path` or, without such a file, the shipped topology of that name.

    Raises:
        UserError: If there is no such file, or it is not a valid topology.
    """
    source = find(Path(path))
    return parse(read(source), source)


def parse(tree: Any, source: Path | None = None) -> Topology:
    """Return the topology that the parsed content of a topology file describes.

    Args:
        tree: The content: mappings, lists, strings and numbers.
        source: Path of the topology file, if there is one; `based_on` may name another file in the same folder.

    Raises:
        UserError: If the tree is not a valid topology.
    """
    spec = validated(tree)
    if spec.based_on is not None:
        base = validated(read(find(Path(spec.based_on), beside=source)))
        spec = spec.model_copy(update={"inside": spec.inside or base.inside, "links": [*base.links, *spec.links]})
    count = len(spec.peers) or sum(group.count for group in spec.regions.values())
    require(count <= MOST_TOPOLOGY_PEERS, f"a swarm of at most {MOST_TOPOLOGY_PEERS} peers", f"{count}")
    peers = spec.peers or [peer for name, group in spec.regions.items() for peer in group.peers(name)]
    require(len(peers) >= 2, f"a swarm of at least 2 peers; the file has {len(peers)}")
    ids = tuple(peer.id for peer in peers)
    require(len(set(ids)) == len(ids), "every peer id once", next((i for i in ids if ids.count(i) > 1), ""))
    matrices = _matrices(spec, [peer.region for peer in peers])
    known = {peer.region for peer in peers}
    unknown = next((region for region in spec.sites if region not in known), None)
    if unknown is not None:
        raise UserError(f"topology: sites name an unknown region {unknown}; known: {listed(unknown, sorted(known))}")
    sites = tuple(Site(region, site.up_gbps * GBIT, site.down_gbps * GBIT) for region, site in spec.sites.items())
    return _topology(peers, matrices, _workload(spec.workload) if spec.workload else None, sites)


def topology_from_profiles(
    profiles: Mapping[str, JsonFields],
    links: Mapping[tuple[str, str], tuple[float, float]],
    costs: Mapping[str, KindCosts] | None = None,
) -> Topology:
    """Return the topology of a running swarm from its peers' measurements.

    Args:
        profiles: Peer id -> {region, device, memory_bytes, flops (FLOP/s), up, down (bytes/s), latency_s (seconds)}. A
            missing or zero entry was not measured: `up` and `down` then count as 12.5 MB/s, `latency_s` as 50 ms, other
            numbers as 0, and names as "unknown".
        links: (from, to) -> (one-way delay in seconds, bytes/s) of the measured links. Any other link gets the sum of
            both peers' latencies, and the lesser of the sender's `up` and the receiver's `down`.
        costs: Peer id -> measured costs of the embedding, of a block and of the head on the peer's device.

    Raises:
        UserError: If there are fewer than two peers.
    """
    ids = sorted(profiles)
    require(len(ids) >= 2, f"a swarm of at least 2 peers; it has {len(ids)}")
    up = np.array([float(profiles[i].get("up") or 12.5e6) for i in ids])
    down = np.array([float(profiles[i].get("down") or 12.5e6) for i in ids])
    latency = np.array([float(profiles[i].get("latency_s") or 0.05) for i in ids])
    delay, bandwidth = np.add.outer(latency, latency), np.minimum.outer(up, down)
    index = {name: i for i, name in enumerate(ids)}
    for (sender, receiver), (delay_s, rate) in links.items():
        if sender in index and receiver in index and rate > 0:
            delay[index[sender], index[receiver]] = delay_s
            bandwidth[index[sender], index[receiver]] = rate
    up, down = np.maximum(up, bandwidth.max(axis=1)), np.maximum(down, bandwidth.max(axis=0))
    peers = [
        PeerForm(
            id=name,
            region=str(profiles[name].get("region") or "unknown"),
            device=str(profiles[name].get("device") or "unknown"),
            memory_gb=float(profiles[name].get("memory_bytes") or 0) / 1e9,
            tflops=float(profiles[name].get("flops") or 0) / 1e12,
            up_gbps=up[number] / GBIT,
            down_gbps=down[number] / GBIT,
        )
        for number, name in enumerate(ids)
    ]
    found = _topology(peers, LinkMatrices(delay, bandwidth, np.zeros_like(delay)), None)
    return replace(found, costs=tuple(costs.get(name, UNMEASURED) for name in ids)) if costs else found


def _workload(form: WorkloadForm) -> Workload:
    return Workload(form.stages, form.replicas, form.gradient_gbytes, form.activation_gbytes, form.tokens)


def _matrices(spec: TopologyFile, regions: list[str]) -> LinkMatrices:
    """Return the properties of links between peers; raise UserError if one is missing or not valid."""
    count = len(regions)
    if (spec.delay_ms is None) != (spec.bandwidth_gbps is None):
        raise UserError("topology: expected both delay_ms and bandwidth_gbps, or neither; one of them is missing")
    if spec.loss is not None and spec.delay_ms is None:
        raise UserError("topology: loss needs delay_ms and bandwidth_gbps; without these, set loss in each of links")
    if spec.delay_ms is not None:
        given = ((one, getattr(spec, one.key)) for one in LINK_PROPERTIES.values())
        found = [np.zeros((count, count)) if rows is None else _full(one, rows, count) for one, rows in given]
        return LinkMatrices._make(found)
    names = list(dict.fromkeys(regions))
    return _by_region(spec, names, np.array([names.index(region) for region in regions]))


def _full(one: LinkProperty, rows: list[list[float]], count: int) -> Floats:
    """Return a matrix of the file as a count x count array in SI units; raise UserError if it is not valid."""
    shape = f"{len(rows)} rows of {sorted({len(row) for row in rows})}"
    square = len(rows) == count and all(len(row) == count for row in rows)
    require(square, f"{one.key} of {count} x {count} numbers, one row per peer", shape)
    matrix = np.array(rows, dtype=np.float64)
    off = ~np.eye(count, dtype=bool)
    good = np.isfinite(matrix[off]) & one.is_valid(matrix[off])
    worst = np.argwhere(off)[int(np.argmin(good))]
    found = f"{matrix[tuple(worst)]} at {tuple(map(int, worst))}"
    require(bool(good.all()), f"{one.key} {one.bounds} between peers", found)
    return one.in_si(matrix)


def _by_region(spec: TopologyFile, names: list[str], region_N: Ints) -> LinkMatrices:
    """Return the properties of links by the peers' regions; raise UserError if a link is missing."""
    count = len(names)
    links = {}  # (row, column) of regions -> its link; later ones replace earlier ones
    known = {name: i for i, name in enumerate(names)}
    for link in spec.links:
        for name in link.between:
            if name not in known and spec.based_on is None:
                raise UserError(f"topology: links name an unknown region {name}; known: {listed(name, names)}")
        if all(name in known for name in link.between):
            a, b = (known[name] for name in link.between)
            links[a, b] = links[b, a] = link
    alone = np.bincount(region_N, minlength=count) < 2  # a region with one peer needs no link within the region
    found = []
    for one in LINK_PROPERTIES.values():
        matrix = np.full((count, count), getattr(spec.across, one.key, np.nan))
        if spec.inside:
            np.fill_diagonal(matrix, getattr(spec.inside, one.key))
        for pair, link in links.items():
            matrix[pair] = getattr(link, one.key)
        missing = np.isnan(matrix) & ~np.diag(alone)
        if missing.any():
            a, b = np.argwhere(missing)[0]
            raise UserError(f"topology: no link between {names[a]} and {names[b]}; add one to links, inside or across")
        found.append(one.in_si(np.nan_to_num(matrix, nan=one.inside)[np.ix_(region_N, region_N)]))
    return LinkMatrices._make(found)


def _topology(
    peers: Sequence[PeerForm],
    matrices: LinkMatrices,
    workload: Workload | None,
    sites: tuple[Site, ...] = (),
) -> Topology:
    """Return the topology of these peers; their uplinks and downlinks, and those of sites, limit each link's bandwidth.

    The diagonals of `matrices` are overwritten.
    """
    up = np.array([peer.up_gbps * GBIT for peer in peers])
    down = np.array([peer.down_gbps * GBIT for peer in peers])
    bandwidth = np.minimum(matrices.bandwidth, np.minimum.outer(up, down))
    for site in sites:
        inside = np.array([peer.region == site.region for peer in peers])
        bandwidth[np.ix_(inside, ~inside)] = np.minimum(bandwidth[np.ix_(inside, ~inside)], site.up)
        bandwidth[np.ix_(~inside, inside)] = np.minimum(bandwidth[np.ix_(~inside, inside)], site.down)
    costs = tuple(peer.layers.costs() if peer.layers else UNMEASURED for peer in peers)
    matrices = matrices._replace(bandwidth=bandwidth)
    for one, matrix in zip(LINK_PROPERTIES.values(), matrices, strict=True):
        np.fill_diagonal(matrix, one.to_itself)
    return Topology(
        ids=tuple(peer.id for peer in peers),
        regions=tuple(peer.region for peer in peers),
        devices=tuple(peer.device for peer in peers),
        memory_bytes=np.array([peer.memory_gb * 1e9 for peer in peers]),
        flops=np.array([peer.tflops * 1e12 for peer in peers]),
        links=matrices,
        up=up,
        down=down,
        workload=workload,
        sites=sites,
        costs=costs if any(peer.layers for peer in peers) else (),
    )
