"""Connect state machines to networks: effects, events, and the interfaces Transport and Directory.

Machines emit the effects Ask, Reply, Announce and Lookup. A host executes these effects on a Transport and a Directory,
and gives the machines the events Asked, Answered, AskFailed and Found. comm/net/libp2p.py and
tests/comm/net/loopback.py implement both interfaces, and one suite of tests runs against both implementations.
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
    """Label that a machine attaches to a question. The answer's event contains the same tag.

    Each machine has its own base class of tags, by which the node delivers answers to the machine
    (peers/runtime/node.py). The base class has a subclass for each kind of question.
    """

    measures_link: ClassVar[bool] = True  # True: peers answer at once, so the time until the answer measures the link
    may_be_late: ClassVar[bool] = False  # True: a reachable peer may miss the deadline, for example while it computes


@dataclass(frozen=True, slots=True)
class Ask:
    """Effect: send a question to peer `to`; the answer must come within `deadline_s` seconds.

    `max_blob_bytes` is the most bytes that the answer's blob may have. The outcome is `Answered` or `AskFailed`.
    """

    tag: Tag
    to: PeerId
    envelope: Envelope
    deadline_s: Seconds
    max_blob_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """Effect: answer another peer's question; `request` is that of the question's `Asked` event."""

    request: int
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Announce:
    """Effect: store a record in the DHT until `expires` (unix seconds)."""

    key: str
    subkey: str
    value: bytes
    expires: float


@dataclass(frozen=True, slots=True)
class Lookup:
    """Effect: fetch all records that the DHT has under a key. A `Found` event brings them."""

    key: str


NetworkEffect = Ask | Reply | Announce | Lookup
Effect = NetworkEffect | Job | Log
"""What a machine of the package comm may emit. Machines of peers emit more kinds (peers/runtime/handlers.py)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Event: another peer has asked this peer a question; the effect `Reply(request, ...)` answers it."""

    request: int
    sender: PeerId
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Answered:
    """Event: peer `peer` has answered our question with this tag."""

    tag: Tag
    peer: PeerId
    envelope: Envelope
    seconds: Seconds  # time from the question to the end of the answer
    first_byte_s: Seconds  # time from the question to the first byte of the answer
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class AskFailed:
    """Event: our question with this tag to peer `peer` got no valid answer."""

    tag: Tag
    peer: PeerId
    reason: str  # one word from core/reasons.py, such as `deadline`
    seconds: Seconds  # time from the question to its failure


@dataclass(frozen=True, slots=True)
class Found:
    """Event: the result of a Lookup. `values` are the key's values by subkey, which nobody has verified yet."""

    key: str
    values: Mapping[str, bytes]


NetworkEvent = Asked | Answered | AskFailed | Found
Event = Woke | NetworkEvent | Outcome


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question, as a Transport returns it, with times and sizes for the meter."""

    envelope: Envelope
    seconds: Seconds  # time from the question to the end of the answer
    first_byte_s: Seconds  # time from the question to the first byte of the answer
    sent_bytes: int
    received_bytes: int

    def to(self, ask: Ask) -> Answered:
        """Return the `Answered` event for the state machine that has emitted `ask`, the effect behind the question."""
        took_s, first_byte_s = self.seconds, self.first_byte_s
        return Answered(ask.tag, ask.to, self.envelope, took_s, first_byte_s, self.sent_bytes, self.received_bytes)


class AskError(Exception):
    """Raised if a question gets no valid answer; `reason` has the same values as AskFailed.reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """Create the error with a reason of one word (core/reasons.py), and a detail for the user."""
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


Handler = Callable[[PeerId, Envelope], Awaitable[Envelope]]
"""Returns our answer to a peer's question. A transport calls it only for a question that `decode` accepts."""

BlobBound = Callable[[Message], int]
"""Returns the size of the largest blob that may come with a message, in bytes."""


Knows = Callable[[PeerId], bool]
"""Returns whether a peer is known: it has a valid record, answered us at our start, or was a member of our last rounds.

All other peers are strangers.
"""


def knows_all(peer: PeerId) -> bool:
    """Return True, so that a server that calls this function treats no peer as a stranger."""
    return True


class Transport(Protocol):
    """Interface of a network on which peers ask and answer questions; see this module's docstring."""

    peer: PeerId

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        """Send a question to a peer and return its answer.

        Args:
            to: The peer to ask.
            envelope: The question and its blob.
            deadline_s: Seconds within which the call returns or raises.
            max_blob_bytes: Most bytes that the blob of the answer may have.

        Raises:
            AskError: If no valid answer comes in time.
        """

    async def serve(self, handler: Handler, bound: BlobBound, knows: Knows = knows_all) -> None:
        """Answer questions from now on. A malformed question is refused, and counted in `refused`.

        The number of questions answered at the same time is limited: each known sender has a share, and all strangers
        together have one small share.

        Args:
            handler: Returns the answer to each question.
            bound: Returns the largest blob that a question may have, in bytes.
            knows: Returns False for a peer that is a stranger.
        """

    def pace(self, rate: Callable[[], float | None]) -> None:
        """Send questions and answers at `rate()` bytes/s at most from now on; a rate of None means no limit."""

    def take_sent(self) -> Mapping[PeerId, int]:
        """Return the bytes of large messages, without probes, that have left to each peer since the last call."""

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Remember the addresses that a peer announces; `ask` dials them if the peer is not connected."""

    async def drop(self, peer: PeerId) -> None:
        """Close all connections to a peer, and abort the questions in flight on them."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Return the number of other peers' questions that this peer has refused or failed to answer, by reason."""

    def processor_s(self) -> Seconds:
        """Return the CPU seconds that the network's own processes, such as a daemon, have used; 0 if unknown."""

    async def close(self) -> None:
        """Close all connections, and answer no more questions."""


class Directory(Protocol):
    """Interface of a DHT: it stores records under a key and a subkey, each with an expiry in unix seconds."""

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        """Store a record until `expires` (unix seconds). A stored record is replaced only if it expires earlier.

        Returns:
            Whether at least one node of the DHT accepted the record.
        """

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        """Return the values of a key that have not expired, by subkey; empty if the DHT does not answer."""
