"""The border between machines and networks.

Machines emit Ask, Reply, Announce and Lookup; a host carries them out on a Transport and a Directory and brings
back Asked, Answered, AskFailed and Found. comm/net/libp2p.py and tests/comm/net/loopback.py implement both protocols,
and one suite of tests holds them to the same behaviour.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Message
from decentral.core.ids import PeerId
from decentral.core.jobs import Job, Outcome
from decentral.core.machine import Log, Woke
from decentral.core.units import Seconds


@dataclass(frozen=True, slots=True)
class Tag:
    """What a question is for. It comes back with the answer, untouched.

    Each machine that asks has subclasses of its own below one that the node knows it by (peers/runtime/node.py).
    `measures_link` tells whether the time until the answer says how fast the link is. `may_be_late` tells whether
    an answer may be late because a peer computes, or because our own uplink is thin for what we send, so that a missed
    deadline does not mean that the peer is gone.
    """

    measures_link: ClassVar[bool] = True
    may_be_late: ClassVar[bool] = False


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


NetworkEffect = Ask | Reply | Announce | Lookup
Effect = NetworkEffect | Job | Log
"""What a machine of comm returns. A machine of peers returns a few kinds more (peers/runtime/handlers.py)."""


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
    first_byte_s: Seconds  # from the question until the answer began to arrive
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class AskFailed:
    """`reason` is one word: deadline, unreachable, cut, or a ProtocolError's."""

    tag: Tag
    peer: PeerId
    reason: str
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Found:
    """The values by subkey, as others stored them: nothing is verified yet."""

    key: str
    values: Mapping[str, bytes]


NetworkEvent = Asked | Answered | AskFailed | Found
Event = Woke | NetworkEvent | Outcome


# What drivers implement


@dataclass(frozen=True, slots=True)
class Answer:
    envelope: Envelope
    seconds: Seconds
    first_byte_s: Seconds  # from the question until the answer began to arrive
    sent_bytes: int
    received_bytes: int

    def to(self, ask: Ask) -> Answered:
        """Return this answer as the event that the machine which has asked gets."""
        took_s, first_byte_s = self.seconds, self.first_byte_s
        return Answered(ask.tag, ask.to, self.envelope, took_s, first_byte_s, self.sent_bytes, self.received_bytes)


class AskError(Exception):
    """No answer came; `reason` is as in AskFailed."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


Handler = Callable[[PeerId, Envelope], Awaitable[Envelope]]
"""Answers a question. A question that breaks the format never reaches it."""

BlobBound = Callable[[Message], int]
"""How many bytes a question's blob may have."""


Knows = Callable[[PeerId], bool]
"""Whether a peer has a standing with us: a valid record, or a part in what we do. All others are strangers."""


def knows_all(peer: PeerId) -> bool:
    """For those that serve whoever asks."""
    return True


class Transport(Protocol):
    peer: PeerId

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        """Asks and returns the answer, with at most `max_blob_bytes` of blob. Raises AskError within `deadline_s`."""

    async def serve(self, handler: Handler, bound: BlobBound, knows: Knows = knows_all) -> None:
        """Answers questions from now on. One that breaks the format is counted in `refused` and goes no further.

        Each sender has its share of what is answered at a time; those that `knows` does not know share a small part.
        """

    def pace(self, rate: Callable[[], float | None]) -> None:
        """From now on questions and answers leave no faster than this, in bytes/s; None: as fast as they can."""

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Remembers the addresses at which a peer says that it listens."""

    async def drop(self, peer: PeerId) -> None:
        """Ends all connections to a peer, with the questions on them."""

    @property
    def refused(self) -> Mapping[str, int]:
        """How many questions were refused, by reason."""

    def processor_s(self) -> Seconds:
        """Processor time that other processes have spent on our traffic so far; 0 where that is not known."""

    async def close(self) -> None: ...


class Directory(Protocol):
    """A DHT: records under a key and a subkey, each with its time of expiry (unix seconds)."""

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        """Whether it was stored. A record is replaced only by one that expires later."""

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        """The values by subkey that have not expired; none if the DHT does not answer."""
