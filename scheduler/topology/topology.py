"""A swarm's devices and links as arrays, read from a topology file or from measured profiles.

    peers: [{id, region, device, memory_gb, tflops}, ...]        one entry per peer, or
    regions: {Oregon: {count: 8, device: V100, memory_gb: 16, tflops: 112}, ...}
                                                                 either may also have up_gbps, down_gbps: of each peer
    delay_ms, bandwidth_gbps: N x N                              in the order of the peers, one-way; or
    inside: {delay_ms, bandwidth_gbps}                           between two peers of one region
    across: {delay_ms, bandwidth_gbps}                           between regions that no link names
    links: [{between: [Oregon, Ohio], delay_ms: 49, bandwidth_gbps: 1.10}, ...]
                                                                 any of these may have `loss`, a share of the packets
    based_on: ten-cities                                         `inside` and `links` from another file
    workload: {stages, replicas, gradient_gbytes, activation_gbytes}      optional

A file has the units in which people know these figures (ms, Gb/s, GB, TFLOP/s); the arrays are in seconds, bytes/s,
bytes and FLOP/s. In names of arrays N is the number of peers. A peer's uplink and downlink bound each of its pairs, and
all of them together; `bandwidth` is that of a pair while nobody else sends.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decentral.core.errors import UserError
from decentral.core.strict_json import JsonFields
from decentral.scheduler.topology.arrays import Floats, Ints

MAX_FILE_BYTES = 256 * 1024 * 1024  # two matrices of 4,096 peers as text
GBIT = 1e9 / 8  # bytes


@dataclass(frozen=True, slots=True)
class Workload:
    """What one optimiser step of a synchronous pipeline communicates (Yuan et al., arXiv 2206.01288).

    The replicas of a stage average `gradient_gbytes`, and in each pipeline a stage sends `activation_gbytes` to the
    next. Where `stages` or `replicas` is None, these figures are totals of the whole model and of the whole batch, and
    the search for the degrees of parallelism (sync/plan.py) divides them.
    """

    stages: int | None = 8
    replicas: int | None = 8
    gradient_gbytes: float = 0.65
    activation_gbytes: float = 0.47124928  # 62,500 tokens x 2,024 channels x 4 bytes, over 2**30


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """N peers and the links between them. A peer has no delay and unlimited bandwidth to itself."""

    ids: tuple[str, ...]
    regions: tuple[str, ...]
    devices: tuple[str, ...]
    memory_bytes: Floats  # N
    flops: Floats  # N, FLOP/s
    delay_s: Floats  # N x N, one way, from the row's peer to the column's
    bandwidth: Floats  # N x N, bytes/s in the same direction
    up: Floats  # N, bytes/s of all that a peer sends; inf: unlimited
    down: Floats  # N
    loss: Floats  # N x N, the share of packets that are lost
    workload: Workload | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def digest(self) -> str:
        """A digest that is equal for equal swarms, whatever the order of their peers in the file."""
        order = sorted(range(len(self)), key=self.ids.__getitem__)
        text = json.dumps([[self.ids[i], self.regions[i], self.devices[i]] for i in order])
        state = hashlib.blake2b(text.encode(), digest_size=16)
        for vector in (self.memory_bytes, self.flops):
            state.update(np.ascontiguousarray(vector[order]).tobytes())
        for matrix in (self.delay_s, self.bandwidth):
            state.update(np.ascontiguousarray(matrix[np.ix_(order, order)]).tobytes())
        return state.hexdigest()


def regions_of(topology: Topology) -> Ints:
    """Each peer's region as a number, in order of first appearance: region_N."""
    number = {name: i for i, name in enumerate(dict.fromkeys(topology.regions))}
    return np.array([number[region] for region in topology.regions])


def load(path: str | Path) -> Topology:
    """Reads a topology file (YAML or JSON), or the shipped one of that name. Raises UserError if it is not valid."""
    source = _find(Path(path))
    return parse(_read(source), source)


def parse(tree: Any, source: Path | None = None) -> Topology:
    """A topology from the tree that a YAML or JSON file holds; `based_on` is looked up beside `source`.

    Raises UserError, in one line, for a tree that is no topology.
    """
    spec = _validated(tree)
    if spec.based_on is not None:
        base = _validated(_read(_find(Path(spec.based_on), beside=source)))
        spec = spec.model_copy(update={"inside": spec.inside or base.inside, "links": [*base.links, *spec.links]})
    peers = spec.peers or [peer for name, group in spec.regions.items() for peer in group.peers(name)]
    _require(len(peers) >= 2, f"a swarm of at least 2 peers; the file has {len(peers)}")
    ids = tuple(peer.id for peer in peers)
    _require(len(set(ids)) == len(ids), "every peer id once", next((i for i in ids if ids.count(i) > 1), ""))
    matrices = _matrices(spec, [peer.region for peer in peers])
    return _topology(peers, matrices, spec.workload.workload() if spec.workload else None)


def topology_from_profiles(
    profiles: Mapping[str, JsonFields], links: Mapping[tuple[str, str], tuple[float, float]]
) -> Topology:
    """A live swarm's topology from what its peers measured. Raises UserError for fewer than two peers.

    `profiles`: peer id -> {region, device, memory_bytes, flops (FLOP/s), up, down (bytes/s), latency_s}. An entry that
    is missing or zero was not measured: `up` and `down` then count as 12.5 MB/s, `latency_s` as 50 ms, others as 0.
    `links`: (from, to) -> (one-way delay in seconds, bytes/s) of the links that were measured; any other link gets
    the sum of both latencies and the lesser of the sender's `up` and the receiver's `down`.
    """
    ids = sorted(profiles)
    _require(len(ids) >= 2, f"a swarm of at least 2 peers; it has {len(ids)}")
    up = np.array([float(profiles[i].get("up") or 12.5e6) for i in ids])
    down = np.array([float(profiles[i].get("down") or 12.5e6) for i in ids])
    latency = np.array([float(profiles[i].get("latency_s") or 0.05) for i in ids])
    delay, bandwidth = np.add.outer(latency, latency), np.minimum.outer(up, down)
    index = {name: i for i, name in enumerate(ids)}
    for (sender, receiver), (delay_s, rate) in links.items():
        if sender in index and receiver in index and rate > 0:
            delay[index[sender], index[receiver]] = delay_s
            bandwidth[index[sender], index[receiver]] = rate
    peers = [
        _Peer(
            id=name,
            region=str(profiles[name].get("region") or "unknown"),
            device=str(profiles[name].get("device") or "unknown"),
            memory_gb=float(profiles[name].get("memory_bytes") or 0) / 1e9,
            tflops=float(profiles[name].get("flops") or 0) / 1e12,
        )
        for name in ids
    ]
    return _topology(peers, (delay, bandwidth, np.zeros_like(delay)), None)


# The fields of a topology file


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Link(_Strict):
    delay_ms: Annotated[float, Field(ge=0, lt=1e7)]
    bandwidth_gbps: Annotated[float, Field(gt=0)]
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0


class _RegionLink(_Link):
    between: tuple[str, str]


class _Device(_Strict):
    device: str = "unknown"
    memory_gb: Annotated[float, Field(ge=0)] = 0.0
    tflops: Annotated[float, Field(ge=0)] = 0.0
    up_gbps: Annotated[float, Field(gt=0)] = np.inf
    down_gbps: Annotated[float, Field(gt=0)] = np.inf


class _Peer(_Device):
    id: str
    region: str = "unknown"


class _Group(_Device):
    count: Annotated[int, Field(ge=0)] = 1

    def peers(self, region: str) -> list[_Peer]:
        shared = {**self.model_dump(exclude={"count"}), "region": region}
        return [_Peer.model_validate({**shared, "id": f"{region}-{i}"}) for i in range(self.count)]


class _WorkloadFields(_Strict):
    stages: Annotated[int, Field(gt=0)] | None = None
    replicas: Annotated[int, Field(gt=0)] | None = None
    gradient_gbytes: Annotated[float, Field(ge=0)] = 0.65
    activation_gbytes: Annotated[float, Field(ge=0)] = 0.47124928

    def workload(self) -> Workload:
        return Workload(self.stages, self.replicas, self.gradient_gbytes, self.activation_gbytes)


class _File(_Strict):
    peers: list[_Peer] = []
    regions: dict[str, _Group] = {}
    inside: _Link | None = None
    across: _Link | None = None
    links: list[_RegionLink] = []
    based_on: str | None = None
    delay_ms: list[list[float]] | None = None
    bandwidth_gbps: list[list[float]] | None = None
    loss: list[list[float]] | None = None
    workload: _WorkloadFields | None = None


def _find(path: Path, beside: Path | None = None) -> Path:
    """The path itself, else the file of that name beside the one that refers to it, else the shipped one."""
    shipped = Path(str(files("decentral.configs") / "topologies"))
    tried = [path, *([beside.parent / f"{path}.yaml"] if beside else []), shipped / f"{path}.yaml"]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(file.stem for file in shipped.glob("*.yaml")))
    raise UserError(f"topology: no file {path}; shipped ones: {names}")


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"topology: {path} is larger than {MAX_FILE_BYTES >> 20} MiB; is it a topology?")
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"topology: cannot read {path} ({error})") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"topology: {path} is not valid {path.suffix.lstrip('.') or 'YAML'}") from None


def _validated(tree: Any) -> _File:
    _require(isinstance(tree, dict), "a mapping with peers or regions", type(tree).__name__)
    try:
        return _File.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise UserError(f"topology: unknown key {key}; known: {', '.join(_File.model_fields)}") from None
        expected = first["msg"].removeprefix("Input should be ")
        raise UserError(f"topology: {key} must be {expected}; it is {str(first['input'])[:60]}") from None


def _matrices(spec: _File, regions: list[str]) -> tuple[Floats, Floats, Floats]:
    """Delay in seconds, bandwidth in bytes/s and loss between any two peers, each N x N."""
    count = len(regions)
    if (spec.delay_ms is None) != (spec.bandwidth_gbps is None):
        raise UserError("topology: delay_ms and bandwidth_gbps belong together; one of them is missing")
    if spec.loss is not None and spec.delay_ms is None:
        raise UserError("topology: a matrix of loss needs delay_ms and bandwidth_gbps; links have a loss of their own")
    if spec.delay_ms is not None and spec.bandwidth_gbps is not None:
        delay = _full("delay_ms", spec.delay_ms, count)
        rate = _full("bandwidth_gbps", spec.bandwidth_gbps, count)
        loss = _full("loss", spec.loss, count) if spec.loss is not None else np.zeros((count, count))
        return delay / 1e3, GBIT * rate, loss
    names = list(dict.fromkeys(regions))
    return _by_region(spec, names, np.array([names.index(region) for region in regions]))


def _full(name: str, rows: list[list[float]], count: int) -> Floats:
    """The file's own matrix, count x count. Raises UserError for another shape, or a value outside its range."""
    shape = f"{len(rows)} rows of {sorted({len(row) for row in rows})}"
    square = len(rows) == count and all(len(row) == count for row in rows)
    _require(square, f"{name} of {count} x {count} numbers, one row per peer", shape)
    matrix = np.array(rows, dtype=np.float64)
    off = ~np.eye(count, dtype=bool)
    sign = {"delay_ms": "at least 0", "bandwidth_gbps": "above 0", "loss": "at least 0 and below 1"}[name]
    above = matrix[off] > 0 if name == "bandwidth_gbps" else matrix[off] >= 0
    good = np.isfinite(matrix[off]) & above & ((matrix[off] < 1) | (name != "loss"))
    worst = np.argwhere(off)[int(np.argmin(good))]
    _require(bool(good.all()), f"{name} {sign} between peers", f"{matrix[tuple(worst)]} at {tuple(map(int, worst))}")
    return matrix


def _by_region(spec: _File, names: list[str], region_N: Ints) -> tuple[Floats, Floats, Floats]:
    """The matrices that `inside`, `across` and `links` describe. Raises UserError if a link is missing."""
    count = len(names)
    default = spec.across
    delay = np.full((count, count), default.delay_ms if default else np.nan)
    rate = np.full((count, count), default.bandwidth_gbps if default else np.nan)
    loss = np.full((count, count), default.loss if default else 0.0)
    if spec.inside:
        np.fill_diagonal(delay, spec.inside.delay_ms)
        np.fill_diagonal(rate, spec.inside.bandwidth_gbps)
        np.fill_diagonal(loss, spec.inside.loss)
    known = {name: i for i, name in enumerate(names)}
    for link in spec.links:
        for name in link.between:
            if name not in known and spec.based_on is None:
                raise UserError(f"topology: links name an unknown region {name}; known: {', '.join(names)}")
        if all(name in known for name in link.between):
            a, b = (known[name] for name in link.between)
            delay[a, b] = delay[b, a] = link.delay_ms
            rate[a, b] = rate[b, a] = link.bandwidth_gbps
            loss[a, b] = loss[b, a] = link.loss
    alone = np.bincount(region_N, minlength=count) < 2  # a region of one peer needs no link inside
    missing = np.isnan(rate) & ~np.diag(alone)
    if missing.any():
        a, b = np.argwhere(missing)[0]
        raise UserError(f"topology: no link between {names[a]} and {names[b]}; add it to links, or inside or across")
    grid = np.ix_(region_N, region_N)
    return np.nan_to_num(delay)[grid] / 1e3, np.nan_to_num(rate, nan=1.0)[grid] * GBIT, loss[grid]


def _topology(peers: Sequence[_Peer], matrices: tuple[Floats, Floats, Floats], workload: Workload | None) -> Topology:
    """`matrices`: delay, bandwidth and loss. A pair's bandwidth is also bounded by the peers' uplink and downlink."""
    delay, bandwidth, loss = matrices
    up = np.array([peer.up_gbps * GBIT for peer in peers])
    down = np.array([peer.down_gbps * GBIT for peer in peers])
    bandwidth = np.minimum(bandwidth, np.minimum.outer(up, down))
    np.fill_diagonal(loss, 0.0)
    np.fill_diagonal(delay, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    return Topology(
        ids=tuple(peer.id for peer in peers),
        regions=tuple(peer.region for peer in peers),
        devices=tuple(peer.device for peer in peers),
        memory_bytes=np.array([peer.memory_gb * 1e9 for peer in peers]),
        flops=np.array([peer.tflops * 1e12 for peer in peers]),
        delay_s=delay,
        bandwidth=bandwidth,
        up=up,
        down=down,
        loss=loss,
        workload=workload,
    )


def _require(condition: bool, expected: str, came: str = "") -> None:
    if not condition:
        raise UserError(f"topology: expected {expected}" + (f"; got {came}" if came else ""))
