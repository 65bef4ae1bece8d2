"""The form of topology files, which `validated` checks: `TopologyFile`.

A file lists its N peers either one by one (`peers`) or by region (`regions`), and its links either as matrices or as
`inside`, `across` and `links`:

    peers: [{id, region, device, memory_gb, tflops}, ...]        one entry per peer
    regions: {Oregon: {count: 8, device: V100, memory_gb: 16, tflops: 112}, ...}
                                                                 both forms may have up_gbps and down_gbps, per peer,
                                                                 and layers: {embedding: {forward_us, backward_us,
                                                                 activation_kb, state_mb}, block: ..., head: ...}
    delay_ms, bandwidth_gbps: N x N                              one way, in the order of the peers
    inside: {delay_ms, bandwidth_gbps}                           link between two peers of one region
    across: {delay_ms, bandwidth_gbps}                           link between two regions that are not in `links`
    links: [{between: [Oregon, Ohio], delay_ms: 49, bandwidth_gbps: 1.10}, ...]
                                                                 each link may have `loss`, the share of lost packets
    sites: {Oregon: {up_gbps: 1, down_gbps: 1}, ...}             link that all peers of a region share to other regions
    based_on: ten-cities                                         takes `inside` and `links` from this other topology
    workload: {stages, replicas, gradient_gbytes, activation_gbytes, tokens}     optional, as each of its fields

`layers` says what one layer of each kind of the planned model takes on the device of a peer: microseconds and kB for a
token, and MB.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decentral.core import foreign_file, own_yaml
from decentral.core.errors import UserError
from decentral.core.layer_work import KindCost, KindCosts
from decentral.core.near_names import listed

MAX_FILE_BYTES = 256 * 1024 * 1024  # larger files are refused unread; the two matrices of 4,096 peers fit


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LinkForm(_Strict):
    """A link: one way's delay, its rate, and the share of lost packets."""

    delay_ms: Annotated[float, Field(ge=0, lt=1e7)]
    bandwidth_gbps: Annotated[float, Field(gt=0)]
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0


class RegionLinkForm(LinkForm):
    """The link between two regions, by name."""

    between: tuple[str, str]


class RatesForm(_Strict):
    """The rates of an uplink and a downlink, by default without limit."""

    up_gbps: Annotated[float, Field(gt=0)] = np.inf
    down_gbps: Annotated[float, Field(gt=0)] = np.inf


class LayerForm(_Strict):
    """What a layer takes on a device: microseconds and kB for a token, and MB of state."""

    forward_us: Annotated[float, Field(ge=1e-6, le=1e10)]
    backward_us: Annotated[float, Field(ge=1e-6, le=1e10)]
    activation_kb: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    state_mb: Annotated[float, Field(ge=0, lt=1e9)] = 0.0

    def cost(self) -> KindCost:
        """Return the cost in seconds and bytes."""
        activation_bytes, state_bytes = round(self.activation_kb * 1e3), round(self.state_mb * 1e6)
        return KindCost(self.forward_us / 1e6, self.backward_us / 1e6, activation_bytes, state_bytes)


class LayersForm(_Strict):
    """What a layer of each kind takes on a device; None: not known."""

    embedding: LayerForm | None = None
    block: LayerForm | None = None
    head: LayerForm | None = None

    def costs(self) -> KindCosts:
        """Return the costs of the three kinds in seconds and bytes."""
        embedding, block, head = (one.cost() if one else None for one in (self.embedding, self.block, self.head))
        return KindCosts(embedding, block, head)


class DeviceForm(RatesForm):
    """What peers by name and by region have in common. 0: not known."""

    device: str = "unknown"
    memory_gb: Annotated[float, Field(ge=0)] = 0.0
    tflops: Annotated[float, Field(ge=0)] = 0.0
    layers: LayersForm | None = None


class PeerForm(DeviceForm):
    """A peer of the topology: its id, its region and its device."""

    id: str
    region: str = "unknown"


class GroupForm(DeviceForm):
    """The equal peers of a region."""

    count: Annotated[int, Field(ge=0)] = 1

    def peers(self, region: str) -> list[PeerForm]:
        """Return the region's peers, which get its name with a number."""
        shared = {**self.model_dump(exclude={"count"}), "region": region}
        return [PeerForm.model_validate({**shared, "id": f"{region}-{i}"}) for i in range(self.count)]


class WorkloadForm(_Strict):
    """The fields of `Workload` (topology.py); each may be missing."""

    stages: Annotated[int, Field(gt=0)] | None = None
    replicas: Annotated[int, Field(gt=0)] | None = None
    gradient_gbytes: Annotated[float, Field(ge=0)] = 0.65
    activation_gbytes: Annotated[float, Field(ge=0)] = 0.47124928
    tokens: Annotated[float, Field(gt=0)] | None = None


class TopologyFile(_Strict):
    """A whole file, before its links are matrices."""

    peers: list[PeerForm] = []
    regions: dict[str, GroupForm] = {}
    inside: LinkForm | None = None
    across: LinkForm | None = None
    links: list[RegionLinkForm] = []
    sites: dict[str, RatesForm] = {}
    based_on: str | None = None
    delay_ms: list[list[float]] | None = None
    bandwidth_gbps: list[list[float]] | None = None
    loss: list[list[float]] | None = None
    workload: WorkloadForm | None = None


def find(path: Path, beside: Path | None = None) -> Path:
    """Return the first existing file: `path`, `path`.yaml in the folder of `beside`, or the shipped topology `path`."""
    shipped = Path(str(files("decentral.configs") / "topologies"))
    tried = [path, *([beside.parent / f"{path}.yaml"] if beside else []), shipped / f"{path}.yaml"]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    names = listed(str(path), sorted(file.stem for file in shipped.glob("*.yaml")))
    raise UserError(f"topology: no file {path}; name a topology file or a shipped topology: {names}")


def read(path: Path) -> Any:
    """Return the content of a YAML or JSON file. Raises UserError if it cannot be read or parsed."""
    try:
        text = foreign_file.read_text(path, MAX_FILE_BYTES)
        return json.loads(text) if path.suffix == ".json" else own_yaml.tree(text, f"topology: {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"topology: cannot read {path} ({getattr(error, 'strerror', error)})") from None
    except (ValueError, RecursionError):
        raise UserError(f"topology: {path} is not valid JSON") from None


def validated(tree: Any) -> TopologyFile:
    """Return the file with this content. Raises UserError, which names the key, if a key or value is not valid."""
    require(isinstance(tree, dict), "a mapping with peers or regions", type(tree).__name__)
    try:
        return TopologyFile.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise UserError(f"topology: unknown key {key}; known: {listed(key, TopologyFile.model_fields)}") from None
        expected = first["msg"].removeprefix("Input should be ")
        raise UserError(f"topology: {key} must be {expected}; it is {str(first['input'])[:60]}") from None


def require(condition: bool, expected: str, came: str = "") -> None:
    """Raise UserError, which says what was expected and what came, unless the condition holds."""
    if not condition:
        raise UserError(f"topology: expected {expected}" + (f"; got {came}" if came else ""))
