"""The record that each peer publishes in the DHT: device, layers, progress and addresses. Start at `PeerRecord`.

A record's body is msgpack, signed together with its DHT key and expiry (comm/wire/identity.py). Every field has bounds;
readers count and ignore a record with a field out of bounds.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import msgpack
from pydantic import AfterValidator, Field, PlainValidator, Strict, TypeAdapter, ValidationError

from decentral.comm.wire.identity import Signer
from decentral.comm.wire.message_fields import Count, Index, Run, UnixTime
from decentral.comm.wire.transport import Directory
from decentral.comm.wire.unpacking import read_msgpack
from decentral.core.credit import MOST_WITNESSED, SeenWork
from decentral.core.errors import ProtocolError, UserError
from decentral.core.fragments import Fragment
from decentral.core.ids import SUFFIX_CHARS, PeerId, RunId
from decentral.core.layer_work import UNMEASURED, KindCosts
from decentral.core.peer_names import PEER_NAME_CHARS
from decentral.core.plain_text import SHOWN_CHARS, plain_text
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.membership import swarm_size

Label = Annotated[str, Strict(), Field(max_length=SHOWN_CHARS), AfterValidator(plain_text)]
Name = Annotated[str, Strict(), Field(max_length=PEER_NAME_CHARS), AfterValidator(plain_text)]
Positive = Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]
MOST_PER_S = 1e12  # a record with more tokens/s or bytes/s is invalid, because such speeds break the planning solver
LEAST_PER_S = 1e-3  # fewer tokens/s or bytes/s count as 0 (not measured), since dividing by them may overflow
PerSecond = Annotated[
    float, Field(ge=0, le=MOST_PER_S, allow_inf_nan=False), AfterValidator(lambda rate: rate * (rate >= LEAST_PER_S))
]
T = TypeVar("T")
MOST_ADDRESSES = 16
ADDRESS_CHARS = 256
MOST_KEPT = 256  # a record lists at most this many fragments whose state the peer keeps on disk without holding them
MAX_BODY_BYTES = 12 * 1024  # a larger record is not read; a valid one has at most about 11 KiB
Address = Annotated[str, Strict(), Field(max_length=ADDRESS_CHARS, pattern=r"^[!-~]*$")]
MOST_LOSS = 1e6  # a record with a larger absolute loss (nats per token) is invalid
MOST_ITEMS = 4096  # a longer array makes a record invalid; the longest one is a plan's list of spans
MOST_RECORDED_LINKS = 8
PerMille = Annotated[int, Strict(), Field(ge=0, le=1000)]
RecordedLink = tuple[Annotated[str, Strict(), Field(max_length=SUFFIX_CHARS, pattern=r"^[!-~]*$")], Count, Count]
"""The end of the other peer's id, bytes/s from that peer, and the round trip in ms; 0 stands for not measured."""
Renewal = Annotated[float, Field(gt=0, le=swarm_size.MOST_RENEW_S, allow_inf_nan=False)]
Addresses = Annotated[tuple[Address, ...], Field(max_length=MOST_ADDRESSES)]


class PeerPhase(StrEnum):
    """The phases of a peer, in its node and in its record; peers/runtime/node.py shows the transitions."""

    JOINING = "joining"
    TRAINING = "training"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Profile:
    """A peer's device and links, as the peer has measured them; its user has chosen `region` and `name`."""

    device: Label
    memory_bytes: Count
    flops: Positive  # measured FLOP/s of a matrix product in the training dtype
    tokens_per_s: PerSecond  # training speed on the whole model of the run, throttling included
    down: PerSecond = 0.0  # download rate in bytes/s, median over links; 0: not measured yet
    up: PerSecond = 0.0  # upload rate in bytes/s, highest of the last uploads; 0: not measured yet
    latency_s: Positive = 0.0  # shortest latency of the peer's links in seconds; 0: not measured yet
    region: Label = ""
    software: Label = ""
    costs: KindCosts = UNMEASURED  # costs of the embedding, of a block and of the head on the peer's device
    changed: UnixTime = 0.0  # when speed or memory last changed much (runtime/own_record.py), by the peer's clock
    name: Name = ""  # what the user calls this peer; "" in records of versions that had no names
    # Whether the peer computes for no other peer; so does an island whose ranks have parts of the model.
    alone: Annotated[bool, Strict()] = False


class Standing(NamedTuple):
    """A peer's training statistics, only for display: nobody can verify them, so no decision depends on them.

    In a record, the statistics are a list of values without names, which takes about 200 bytes.
    """

    # The average training loss and the last held-out loss, in nats per token; None: not known.
    loss: Annotated[float, Field(ge=-MOST_LOSS, le=MOST_LOSS, allow_inf_nan=False)] | None = None
    held_out: Annotated[float, Field(ge=-MOST_LOSS, le=MOST_LOSS, allow_inf_nan=False)] | None = None
    shares: Annotated[tuple[PerMille, ...], Field(max_length=16)] = ()  # per mille of time for each of time_spent.KINDS
    exchanges: tuple[Count, Count, Count] = (0, 0, 0)  # how many exchanges succeeded, had no usable snapshot, failed
    sent_bytes: Count = 0
    received_bytes: Count = 0
    links: Annotated[tuple[RecordedLink, ...], Field(max_length=MOST_RECORDED_LINKS)] = ()  # most recently used first
    seen: Annotated[
        tuple[SeenWork, ...], Field(max_length=MOST_WITNESSED)
    ] = ()  # work of other peers that this peer has witnessed


NO_STANDING = Standing()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PeerRecord:
    """The record that a peer publishes about itself in the DHT."""

    run: Run
    time: UnixTime
    addresses: Addresses
    profile: Profile
    first: Index  # the peer holds the layers from `first` to `last` - 1
    last: Index
    step: Count
    lr_step: Count
    tokens: Count
    round: Count = 0
    phase: Annotated[PeerPhase, PlainValidator(lambda value: PeerPhase(value))] = PeerPhase.JOINING  # text, no bytes
    window_s: Positive = 0.0  # shortest gossip window that the peer's links and cores can sustain; 0: not known
    kept: Annotated[
        tuple[tuple[Index, Count], ...], Field(max_length=MOST_KEPT)
    ] = ()  # (fragment, learning-rate step) of each state kept on disk without holding the fragment
    standing: Standing = NO_STANDING
    renew_s: Renewal = swarm_size.LEAST_TIMES.renew_s

    @property
    def lifetime_s(self) -> Seconds:
        """Return the seconds for which other peers trust the record after they read it, unless it expires earlier."""
        return RENEWALS * self.renew_s

    def covers(self, fragment: Fragment) -> bool:
        """Return whether the peer holds all layers of the fragment."""
        return self.first <= fragment.first and fragment.last <= self.last

    def overlaps(self, first: int, last: int) -> bool:
        """Return whether the peer holds any of the layers [first, last)."""
        return self.first < last and first < self.last


_PEER = TypeAdapter(PeerRecord)
_NAMES = [field.name for field in dataclasses.fields(PeerRecord)]
_PROFILE_NAMES = [field.name for field in dataclasses.fields(Profile)]
_PACKED_IF_SET = ("name", "alone")  # so that other records have the bytes that they had before these fields
RENEWALS = 3  # a record expires after this many renewal intervals, so that two lost renewals do no harm
_held: WeakValueDictionary[bytes, PeerRecord] = WeakValueDictionary()  # encoded -> decoded records in use


def pack(record: PeerRecord) -> bytes:
    """Return a record's body: the msgpack bytes that are signed and stored in the DHT."""
    profile = {name: getattr(record.profile, name) for name in _PROFILE_NAMES}
    profile = {name: value for name, value in profile.items() if value or name not in _PACKED_IF_SET}
    body: bytes = msgpack.packb({name: getattr(record, name) for name in _NAMES} | {"profile": profile})
    return body


async def lookup(directory: Directory, run: RunId, own: Signer, now: float) -> dict[PeerId, PeerRecord]:
    """Return the valid records of a run's peers in the DHT, without those of peers that are leaving.

    If the swarm is large, only some shards of the records are read; the same reader (`own`) always reads the same
    shards. `now` is unix time in seconds.
    """
    return (await look(directory, run, own, now))[1]


async def look(directory: Directory, run: RunId, own: Signer, now: float) -> tuple[int, dict[PeerId, PeerRecord]]:
    """Return the level of the DHT keys that the swarm uses (swarm_size.py), and the records that `lookup` returns."""
    read, found = swarm_size.Look(directory, run, own.peer), dict[PeerId, PeerRecord]()
    await read.read()
    for key, values in read.values.items():
        for subkey, value in values.items():
            try:
                record = unpack(own.open(key, PeerId(subkey), value, now)[0])
            except ProtocolError:
                continue
            if record.run == run and record.phase != PeerPhase.LEAVING:
                found[PeerId(subkey)] = record
    return read.level, found


def unpack(body: bytes) -> PeerRecord:
    """Return the record in a body; equal bodies share one frozen record, which saves memory in a simulation.

    Raises:
        ProtocolError: If the body has more than MAX_BODY_BYTES, or is not a valid record.
    """
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(Reason.OVERSIZE, f"a record has at most {MAX_BODY_BYTES} bytes; this one has {len(body)}")
    record = _held.get(body)
    if record is None:
        record = _held[body] = checked(_PEER, body)
    return record


def publishable(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses that fit into a record: at most MOST_ADDRESSES, each of at most ADDRESS_CHARS characters."""
    return tuple(address for address in addresses if len(address) <= ADDRESS_CHARS)[:MOST_ADDRESSES]


def has_moved(before: Sequence[str], now: Sequence[str]) -> bool:
    """Return whether a peer should publish the addresses `now` in place of the published addresses `before`.

    The result is False if `now` has only loopback addresses, since the machine has then probably lost its network.
    """
    return set(now) != set(before) and not all("/127.0.0.1/" in one or "/::1/" in one for one in now)


def first_record(run: RunId, addresses: tuple[str, ...], profile: Profile) -> PeerRecord:
    """Return the record of a peer that holds no layers yet."""
    return PeerRecord(run, 0.0, addresses, profile, 0, 0, 0, 0, 0)


def require_valid(record: PeerRecord) -> None:
    """Check that other peers will accept this peer's own record.

    Raises:
        UserError: If a field is out of bounds; the error names the field.
    """
    try:
        _PEER.validate_python(msgpack.unpackb(pack(record), use_list=False))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        unseen = "other peers would refuse this peer's record, and not see the peer"
        raise UserError(f"{field}: {first['msg']}, but it is {str(first['input'])[:300]!r}: {unseen}") from None


class RecordSource(Protocol):
    """Interface through which the roster gets this peer's own record from the node."""

    def compose_record(self, now: Seconds, leaving: bool) -> PeerRecord:
        """Return this peer's record as of `now`; if `leaving`, the record says that the peer leaves."""


def checked(adapter: TypeAdapter[T], body: bytes) -> T:
    """Return the value in a msgpack body, validated by this adapter.

    Raises:
        ProtocolError: If the body is not msgpack (`Reason.GARBAGE`), or a field is missing, unknown or out of bounds
            (`Reason.FIELDS`).
    """
    try:
        return adapter.validate_python(read_msgpack(body, max_array_len=MOST_ITEMS))
    except ValidationError as error:
        raise ProtocolError(Reason.FIELDS, f"{error.error_count()} fields are missing, unknown or invalid") from None
    except Exception as error:  # msgpack raises many kinds of errors for invalid bytes
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
