"""The border between machines and networks.

Machines emit Ask, Reply, Announce and Lookup; a host carries them out on a Transport and a Directory and brings
back Asked, Answered, AskFailed and Found. comm/net/libp2p.py and comm/net/loopback.py implement both protocols, and one
suite of tests holds them to the same behaviour.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Message
from decentral.core.ids import PeerId
from decentral.core.units import Seconds


@dataclass(frozen=True, slots=True)
class Tag:
    """What a question is for. It comes back with the answer, untouched.

    Each machine that asks has kinds of its own below one kind that the node knows it by (peers/node/node.py).
    `measures_link`: whether the time until the answer tells how fast the link is. `waits_for_work`: whether an answer
    may be late because a peer computes, so that a missed deadline does not tell that the peer is gone.
    """

    measures_link: ClassVar[bool] = True
    waits_for_work: ClassVar[bool] = False


# Effects


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a question; its answer's blob may have at most `max_blob_bytes`."""

    tag: Tag
    to: PeerId
    envelope: Envelope
    deadline_s: Seconds
    max_blob_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the question with this number."""

    request: int
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Announce:
    """Store a record in the DHT until `expires` (unix seconds)."""

    key: str
    subkey: str
    value: bytes
    expires: float


@dataclass(frozen=True, slots=True)
class Lookup:
    """Fetch all records of a key."""

    key: str


# Events


@dataclass(frozen=True, slots=True)
class Asked:
    request: int
    sender: PeerId
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Answered:
    tag: Tag
    peer: PeerId
    envelope: Envelope
    seconds: Seconds
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class AskFailed:
    """`reason` is one word: deadline, unreachable, cut, or a ProtocolError's."""

    tag: Tag
    peer: PeerId
    reason: str
    seconds: Seconds
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The values by subkey. They are what others stored: unverified."""

    key: str
    values: Mapping[str, bytes]


# What drivers implement


@dataclass(frozen=True, slots=True)
class Answer:
    envelope: Envelope
    seconds: Seconds
    sent_bytes: int
    received_bytes: int


class AskError(Exception):
    """No answer came. `reason` as in AskFailed."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


Handler = Callable[[PeerId, Envelope], Awaitable[Envelope]]
"""Answers a question. A question that breaks the format never reaches it."""

BlobBound = Callable[[Message], int]
"""How large a question's blob may be."""


class Transport(Protocol):
    peer: PeerId

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        """Raises AskError, within `deadline_s`."""
        ...

    async def serve(self, handler: Handler, bound: BlobBound) -> None:
        """Answer questions from now on. What breaks the format is counted in `refused` and goes no further."""
        ...

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Where a peer said it listens."""

    @property
    def refused(self) -> Mapping[str, int]:
        """How often something that came was refused, by reason."""
        ...

    async def close(self) -> None: ...


class Directory(Protocol):
    """A DHT: records under a key and a subkey, each with its time of expiry."""

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool: ...

    async def fetch(self, key: str) -> Mapping[str, bytes]: ...
