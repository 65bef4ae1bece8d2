"""Divide a peer's streams, and its memory for blobs, fairly between the peers that ask it questions.

`FairShare` divides one resource between senders. `QuestionShares` has a FairShare for each resource. `QuestionShare`
records what one question takes of these resources until it is answered.

The rule is dynamic thresholds (Choudhury and Hahne, 1998): a sender may use as much as is free. So one greedy sender
gets half of a resource, n greedy senders get 1/(n+1) each, and 1/(n+1) stays free for peers that ask little. All
strangers (peers without a record in our roster) share one small pool by the same rule. In a private swarm, all peers
that have not yet proved their membership share another small pool. A private swarm counts its members' use by
invitation, not by peer: two machines with the same invitation share what one machine would get.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.comm.wire.private_swarm import PrivateSwarm, share_holder
from decentral.comm.wire.transport import Knows, knows_all
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.units import MiB, Seconds

MAX_STREAMS = 128  # at most this many questions of known peers are answered at a time; others are refused as BUSY
STRANGER_STREAMS = 32  # at most this many questions of all peers without a known record are answered at a time
UNPROVEN_STREAMS = 16  # at most this many questions are answered at a time for peers without proven membership
IDLE_STREAMS = 256  # at most this many streams stay open for a next question; further ones are closed after the answer
# At most this many bytes of questions' blobs are in memory at a time. A sender without a blob in flight may exceed the
# limit if at least one byte is free.
UNDER_WAY_BYTES = 1024 * MiB
SHARE_RENEWS_S = 1.0  # a use of a RateShare counts against its limit for this long


@dataclass(slots=True)
class FairShare:
    """A resource of limited size, and how much of the resource each sender uses."""

    most: int  # size of the resource
    used: int = 0  # how much of the resource all senders together use
    by_sender: dict[str, int] = field(default_factory=dict)

    def take(self, sender: str, amount: int = 1) -> bool:
        """Reserve `amount` of the resource for the sender if the rule allows, and return whether it was reserved.

        The sender's new total must not exceed what is free before the reservation. A sender that has nothing gets any
        amount, as long as something is free.
        """
        fits = self.fits(sender, amount)
        if fits:
            self.add(sender, amount)
        return fits

    def fits(self, sender: str, amount: int = 1, kept: int = 0) -> bool:
        """Return whether `take` would reserve `amount` for the sender if `kept` less of the resource were free."""
        held, free = self.by_sender.get(sender, 0), self.most - self.used - kept
        return free > 0 and (not held or held + amount <= free)

    def add(self, sender: str, amount: int) -> None:
        """Count an amount as used by the sender, even if the rule does not allow it."""
        if amount:
            self.used += amount
            self.by_sender[sender] = self.by_sender.get(sender, 0) + amount

    def give_back(self, sender: str, amount: int = 1) -> None:
        """Free an amount that the sender has reserved with `take`."""
        left = self.by_sender.get(sender, 0) - amount
        assert left >= 0, f"{sender} gives back {amount}, but has only {left + amount}"
        self.used -= amount
        self.by_sender[sender] = left
        if not left:
            del self.by_sender[sender]


class RateShare:
    """A resource of which a limited amount may be used per second, divided fairly between senders."""

    def __init__(self, most: int, now: Callable[[], Seconds]) -> None:
        """Create a resource of which `most` may be used per second. `now` returns the time in seconds."""
        self._share, self._now = FairShare(most), now
        self._taken: deque[tuple[Seconds, str, int]] = deque()  # uses that still count: (until when, sender, amount)

    def fits(self, sender: str, amount: int, kept: int = 0) -> bool:
        """Return what `FairShare.fits` returns if only the uses in the last SHARE_RENEWS_S seconds count."""
        while self._taken and self._taken[0][0] <= self._now():
            _, other, old = self._taken.popleft()
            self._share.give_back(other, old)
        return self._share.fits(sender, amount, kept)

    def used_by(self, sender: str) -> int:
        """Return how much the sender had used in the last SHARE_RENEWS_S seconds before the last call of `fits`."""
        return self._share.by_sender.get(sender, 0)

    def add(self, sender: str, amount: int) -> None:
        """Count an amount as used by the sender, even if the rule does not allow it."""
        self._share.add(sender, amount)
        self._taken.append((self._now() + SHARE_RENEWS_S, sender, amount))


@dataclass(slots=True)
class QuestionShares:
    """The resources that all questions to this peer share: streams in three pools, and bytes of blobs."""

    knows: Knows = knows_all  # returns whether we know a peer's record; if not, the peer uses the pool `strangers`
    private: PrivateSwarm | None = None
    streams: FairShare = field(default_factory=lambda: FairShare(MAX_STREAMS))
    strangers: FairShare = field(default_factory=lambda: FairShare(STRANGER_STREAMS))
    unproven: FairShare = field(default_factory=lambda: FairShare(UNPROVEN_STREAMS))
    under_way: FairShare = field(default_factory=lambda: FairShare(UNDER_WAY_BYTES))

    def enclose(self, private: PrivateSwarm | None) -> None:
        """Count use by invitation to this private swarm from now on, or by peer if `private` is None."""
        self.private = private

    def begin(self, sender: PeerId) -> "QuestionShare":
        """Reserve a stream for a question of this sender. The caller must call `end` on the returned QuestionShare.

        Raises:
            ProtocolError: If the sender, or its invitation, already uses its share of streams.
        """
        admitted = self.private is None or self.private.admits(sender)
        known = admitted and self.knows(sender)
        pool = self.streams if known else self.strangers if admitted else self.unproven
        holder = share_holder(self.private, sender)
        if not pool.take(holder):
            raise ProtocolError(
                Reason.BUSY, f"you already use {pool.by_sender.get(holder, 0)} of {pool.used} busy streams; try later"
            )
        return QuestionShare(sender, holder, pool, self.under_way, known)


@dataclass(slots=True)
class QuestionShare:
    """The stream and the memory for a blob that are reserved for one question, until `end` frees them."""

    sender: PeerId
    holder: PeerId  # whose share is charged: the sender, or its invitation in a private swarm
    pool: FairShare
    under_way: FairShare
    known: bool = True  # False if the sender's record is not known, or the sender has not proved its membership
    blob_bytes: int = 0

    def reserve(self, blob_bytes: int) -> None:
        """Reserve `blob_bytes` of the sender's share for the question's blob. Call this before the blob is read.

        Raises:
            ProtocolError: If the sender, or its invitation, already uses its share of bytes, or if the sender is a
                stranger and the question has a blob.
        """
        if blob_bytes and not self.known:
            raise ProtocolError(Reason.STRANGER, "only a peer with a record in the DHT may send a blob")
        if blob_bytes and not self.under_way.take(self.holder, blob_bytes):
            raise ProtocolError(Reason.BUSY, f"blobs of {self.under_way.used} bytes are in flight; try later")
        self.blob_bytes += blob_bytes

    def end(self) -> None:
        """Free the stream and the bytes that are reserved for the question."""
        self.pool.give_back(self.holder)
        if self.blob_bytes:
            self.under_way.give_back(self.holder, self.blob_bytes)
