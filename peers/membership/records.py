"""A peer's record in the DHT: its profile, its span, its progress, its addresses.

A record's body is msgpack inside a seal (comm/wire/identity.py). Every field has a bound; a body that breaks one is
counted and ignored.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, Literal, TypeVar

import msgpack
from pydantic import Field, Strict, TypeAdapter, ValidationError

from decentral.comm.wire import identity
from decentral.comm.wire.messages import Count, Run
from decentral.comm.wire.transport import Directory
from decentral.core import rng
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Fragment, RetainedStates
from decentral.core.reasons import Reason

Label = Annotated[str, Strict(), Field(max_length=128)]
Positive = Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]
T = TypeVar("T")
PeerPhase = Literal["joining", "training", "leaving"]
Addresses = Annotated[tuple[Annotated[str, Strict(), Field(max_length=256)], ...], Field(max_length=16)]


@dataclass(frozen=True, slots=True)
class Profile:
    """What this peer was measured to be. Only the region's name is declared and not measured."""

    device: Label
    memory_bytes: Count  # memory for the model
    flops: Positive  # FLOP/s of a matrix product in the training dtype
    tokens_per_s: Positive  # speed on the run's whole model, throttling included
    down: Positive = 0.0  # bytes/s, typical of its links; 0: not measured yet
    up: Positive = 0.0
    latency_s: Positive = 0.0
    region: Label = ""
    software: Label = ""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    run: Run
    time: Positive  # unix seconds at the peer
    addresses: Addresses
    profile: Profile
    first: Count  # span [first, last)
    last: Count
    step: Count
    lr_step: Count
    tokens: Count
    round: Count = 0  # number of the all-reduce round
    phase: PeerPhase = "joining"
    window_s: Positive = 0.0  # how long its links and cores need windows to be; 0: not known
    kept: Annotated[RetainedStates, Field(max_length=256)] = ()  # fragment and step of each state that it retains

    def covers(self, fragment: Fragment) -> bool:
        """Whether the peer holds all layers of the fragment."""
        return self.first <= fragment.first and fragment.last <= self.last

    def overlaps(self, first: int, last: int) -> bool:
        """Whether the peer holds any of the layers [first, last)."""
        return self.first < last and first < self.last


_PEER = TypeAdapter(PeerRecord)
_NAMES = [field.name for field in dataclasses.fields(PeerRecord)]
_PROFILE_NAMES = [field.name for field in dataclasses.fields(Profile)]
SMALL_BYTES = 2048  # larger records are not cached: several thousand of this size are a few megabytes


def pack(record: PeerRecord) -> bytes:
    profile = {name: getattr(record.profile, name) for name in _PROFILE_NAMES}
    body: bytes = msgpack.packb({name: getattr(record, name) for name in _NAMES} | {"profile": profile})
    return body


@cache
def keys(run: RunId, shards: int) -> tuple[str, ...]:
    """The keys of a run's records in the DHT."""
    return (f"{run}/peers",) if shards == 1 else tuple(f"{run}/peers/{shard}" for shard in range(shards))


@cache
def key_of(run: RunId, peer: PeerId, shards: int) -> str:
    """The key of this peer's record."""
    return keys(run, shards)[rng.seed_of(0, "shard", peer) % shards]


Open = Callable[[str, PeerId, bytes, float], tuple[bytes, float]]  # comm/wire/identity.py's Signer.open


async def lookup(
    directory: Directory, run: RunId, shards: int, now: float, opened: Open = identity.open_sealed
) -> dict[PeerId, PeerRecord]:
    """The records of all of a run's peers in the DHT, except those that leave. Invalid records are left out."""
    found = {}
    for key in keys(run, shards):
        for subkey, value in (await directory.fetch(key)).items():
            try:
                record = unpack(opened(key, PeerId(subkey), value, now)[0])
            except ProtocolError:
                continue
            if record.run == run and record.phase != "leaving":
                found[PeerId(subkey)] = record
    return found


def unpack(body: bytes) -> PeerRecord:
    """Raises ProtocolError for anything that is not a PeerRecord."""
    return _unpack_cached(body) if len(body) <= SMALL_BYTES else checked(_PEER, body)


@lru_cache(maxsize=1 << 14)
def _unpack_cached(body: bytes) -> PeerRecord:
    """A record is frozen, so simulated peers that read the same bytes may share it."""
    return checked(_PEER, body)


def checked(adapter: TypeAdapter[T], body: bytes) -> T:
    """The value in a msgpack body, every field within its bounds. Raises ProtocolError if it is anything else."""
    try:
        fields: Any = msgpack.unpackb(body, use_list=False, strict_map_key=True)
        return adapter.validate_python(fields)
    except ValidationError as error:
        raise ProtocolError(Reason.FIELDS, f"{error.error_count()} wrong") from None
    except Exception as error:  # msgpack raises many kinds of errors for garbage
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
