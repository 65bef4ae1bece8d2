"""A peer's record in the DHT: its profile, its span, its progress, its addresses.

A record's body is msgpack inside a seal (comm/wire/identity.py). Every field has a bound; a body that breaks one is
counted and ignored.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import msgpack
from pydantic import AfterValidator, Field, Strict, TypeAdapter, ValidationError

from decentral.comm.wire.identity import Signer
from decentral.comm.wire.messages import Count, Index, Run, UnixTime
from decentral.comm.wire.transport import Directory
from decentral.core.errors import ProtocolError, UserError
from decentral.core.fragments import Fragment
from decentral.core.ids import SUFFIX_CHARS, PeerId, RunId
from decentral.core.plain_text import SHOWN_CHARS, plain_text
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.membership import swarm_size

Label = Annotated[str, Strict(), Field(max_length=SHOWN_CHARS), AfterValidator(plain_text)]
Positive = Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]
MOST_PER_S = 1e12  # tokens/s, bytes/s: solvers of plans and routes fail with figures much larger than the others'
PerSecond = Annotated[float, Field(ge=0, le=MOST_PER_S, allow_inf_nan=False)]
T = TypeVar("T")
PeerPhase = Literal["joining", "training", "leaving"]
MOST_ADDRESSES = 16  # of a peer
ADDRESS_CHARS = 256
MOST_KEPT = 256  # retained states that a record names
MAX_BODY_BYTES = 12 * 1024  # of a record; the largest valid one has about 11 KiB
Address = Annotated[str, Strict(), Field(max_length=ADDRESS_CHARS, pattern=r"^[!-~]*$")]
MOST_LOSS = 1e6  # a larger one is none that a peer tells
MOST_RECORDED_LINKS = 8
PerMille = Annotated[int, Strict(), Field(ge=0, le=1000)]
RecordedLink = tuple[Annotated[str, Strict(), Field(max_length=SUFFIX_CHARS, pattern=r"^[!-~]*$")], Count, Count]
"""The end of a peer's id, bytes/s from it, and the round trip in ms; 0 where it was not measured."""
Renewal = Annotated[float, Field(gt=0, le=swarm_size.MOST_RENEW_S, allow_inf_nan=False)]
Addresses = Annotated[tuple[Address, ...], Field(max_length=MOST_ADDRESSES)]


@dataclass(frozen=True, slots=True)
class Profile:
    """What this peer was measured to be. Only the region's name is declared and not measured."""

    device: Label
    memory_bytes: Count  # memory for the model
    flops: Positive  # FLOP/s of a matrix product in the training dtype
    tokens_per_s: PerSecond  # speed on the run's whole model, throttling included
    down: PerSecond = 0.0  # bytes/s, typical of its links; 0: not measured yet
    up: PerSecond = 0.0
    latency_s: Positive = 0.0
    region: Label = ""
    software: Label = ""


class Standing(NamedTuple):
    """How a peer's training goes, for people who look; no peer decides anything by it, as nobody can check it.

    It travels as a list without names, and takes about 200 bytes of a record.
    """

    loss: Annotated[float, Field(ge=-MOST_LOSS, le=MOST_LOSS, allow_inf_nan=False)] | None = None
    held_out: Annotated[float, Field(ge=-MOST_LOSS, le=MOST_LOSS, allow_inf_nan=False)] | None = None
    shares: Annotated[tuple[PerMille, ...], Field(max_length=16)] = ()  # of the training thread's time, by KINDS
    exchanges: tuple[Count, Count, Count] = (0, 0, 0)  # done, solo, failed
    sent_bytes: Count = 0
    received_bytes: Count = 0
    links: Annotated[tuple[RecordedLink, ...], Field(max_length=MOST_RECORDED_LINKS)] = ()  # the latest used come first


NO_STANDING = Standing()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PeerRecord:
    run: Run
    time: UnixTime  # unix seconds at the peer
    addresses: Addresses
    profile: Profile
    first: Index  # span [first, last)
    last: Index
    step: Count
    lr_step: Count
    tokens: Count
    round: Count = 0  # number of the all-reduce round
    phase: PeerPhase = "joining"
    window_s: Positive = 0.0  # how long its links and cores need windows to be; 0: not known
    kept: Annotated[
        tuple[tuple[Index, Count], ...], Field(max_length=MOST_KEPT)
    ] = ()  # fragment and step of each state that it retains
    standing: Standing = NO_STANDING
    renew_s: Renewal = swarm_size.LEAST_TIMES.renew_s  # how often the peer renews it

    @property
    def lifetime_s(self) -> Seconds:
        """How long the record is believed from when it was found, whatever its seal says."""
        return RENEWALS * self.renew_s

    def covers(self, fragment: Fragment) -> bool:
        """Whether the peer holds all layers of the fragment."""
        return self.first <= fragment.first and fragment.last <= self.last

    def overlaps(self, first: int, last: int) -> bool:
        """Whether the peer holds any of the layers [first, last)."""
        return self.first < last and first < self.last


_PEER = TypeAdapter(PeerRecord)
_NAMES = [field.name for field in dataclasses.fields(PeerRecord)]
_PROFILE_NAMES = [field.name for field in dataclasses.fields(Profile)]
RENEWALS = 3  # of a record within its lifetime
_held: WeakValueDictionary[bytes, PeerRecord] = WeakValueDictionary()  # those that somebody has, by their bodies


def pack(record: PeerRecord) -> bytes:
    """Return the bytes of a record as they are signed and stored in the DHT."""
    profile = {name: getattr(record.profile, name) for name in _PROFILE_NAMES}
    body: bytes = msgpack.packb({name: getattr(record, name) for name in _NAMES} | {"profile": profile})
    return body


async def lookup(directory: Directory, run: RunId, own: Signer, now: float) -> dict[PeerId, PeerRecord]:
    """Return the records of a run's peers in the DHT, except those that leave; of a large swarm those of some shards.

    Invalid records are left out. `own` reads the same shards each time.
    """
    return (await look(directory, run, own, now))[1]


async def look(directory: Directory, run: RunId, own: Signer, now: float) -> tuple[int, dict[PeerId, PeerRecord]]:
    """Return the level of the swarm's records (swarm_size.py), and those that `lookup` returns."""
    read, found = swarm_size.Look(directory, run, own.peer), dict[PeerId, PeerRecord]()
    await read.read()
    for key, values in read.values.items():
        for subkey, value in values.items():
            try:
                record = unpack(own.open(key, PeerId(subkey), value, now)[0])
            except ProtocolError:
                continue
            if record.run == run and record.phase != "leaving":
                found[PeerId(subkey)] = record
    return read.level, found


def unpack(body: bytes) -> PeerRecord:
    """Return the record in a body. Simulated peers that read the same bytes share it, as it is frozen.

    Raises:
        ProtocolError: If the body is anything else.
    """
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(Reason.OVERSIZE, f"a record of {len(body)} bytes")
    record = _held.get(body)
    if record is None:
        record = _held[body] = checked(_PEER, body)
    return record


def publishable(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those of a peer's addresses, the first ones first, that a record has room for."""
    return tuple(address for address in addresses if len(address) <= ADDRESS_CHARS)[:MOST_ADDRESSES]


def has_moved(before: Sequence[str], now: Sequence[str]) -> bool:
    """Return whether a peer should publish its addresses `now` in the place of those `before`.

    A machine that is cut off has none but its loopback's for a while, which are of no use to others.
    """
    return set(now) != set(before) and not all("/127.0.0.1/" in one or "/::1/" in one for one in now)


def first_record(run: RunId, addresses: tuple[str, ...], profile: Profile) -> PeerRecord:
    """What a peer tells of itself before it holds anything."""
    return PeerRecord(run, 0.0, addresses, profile, 0, 0, 0, 0, 0)


def require_valid(record: PeerRecord) -> None:
    """Raises UserError, which names the field, if all other peers would refuse this peer's own record."""
    try:
        _PEER.validate_python(msgpack.unpackb(pack(record), use_list=False))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        unseen = "others would refuse this peer's record, and never see it"
        raise UserError(f"{field}: {first['msg']}, but it is {str(first['input'])[:300]!r}: {unseen}") from None


class RecordSource(Protocol):
    def compose_record(self, now: Seconds, leaving: bool) -> PeerRecord:
        """Return our own record of this moment."""


def checked(adapter: TypeAdapter[T], body: bytes) -> T:
    """The value in a msgpack body, every field within its bounds. Raises ProtocolError if it is anything else."""
    try:
        return adapter.validate_python(msgpack.unpackb(body, use_list=False, strict_map_key=True))
    except ValidationError as error:
        raise ProtocolError(Reason.FIELDS, f"{error.error_count()} wrong") from None
    except Exception as error:  # msgpack raises many kinds of errors for garbage
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
