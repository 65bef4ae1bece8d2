"""Fair shares of what a peer has for the questions of others: streams, and bytes that are under way.

Dynamic thresholds (Choudhury and Hahne, 1998): a sender may have as much under way as is free. So one sender alone gets
half, n greedy ones get 1/(n+1) of it each, and as much stays free for one that asks little: nobody has to be sent away
for it. Peers without a record in our roster (strangers) share a small part of their own by the same rule, and so do,
in a private swarm, those that have not proved yet that they are members. Members share by invitations: one invitation
gets no more for being on many machines, or for a thousand names.
"""

from dataclasses import dataclass, field

from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import Knows, knows_all
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.units import MiB

MAX_STREAMS = 128  # questions answered at the same time, half of them of one sender; more are refused as busy
STRANGER_STREAMS = 32  # of them, those of all peers that are not in our roster together
UNPROVEN_STREAMS = 16  # in a private swarm, those of all peers together on which a proof may come, beside the others
IDLE_STREAMS = 256  # streams on which a peer waits for a next question; it closes others after their answer
UNDER_WAY_BYTES = 1024 * MiB  # of the blobs of questions that are read or answered; a sender's first one may exceed it


@dataclass(slots=True)
class FairShare:
    """So much of one thing, and what each sender has of it. No entry is zero, so there are at most `most` entries."""

    most: int
    used: int = 0
    by_sender: dict[PeerId, int] = field(default_factory=dict)

    def take(self, sender: PeerId, amount: int = 1) -> bool:
        """Whether the sender gets it. One that has nothing yet gets any amount while something is free."""
        held, free = self.by_sender.get(sender, 0), self.most - self.used
        if free <= 0 or (held and held + amount > free):
            return False
        if amount:
            self.used += amount
            self.by_sender[sender] = held + amount
        return True

    def give_back(self, sender: PeerId, amount: int = 1) -> None:
        left = self.by_sender.get(sender, 0) - amount
        assert left >= 0, f"{sender} gives back {amount} more than it has"
        self.used -= amount
        self.by_sender[sender] = left
        if not left:
            del self.by_sender[sender]


@dataclass(slots=True)
class QuestionShares:
    """What all questions that a peer answers may take."""

    knows: Knows = knows_all
    private: PrivateSwarm | None = None  # None: the swarm is public
    streams: FairShare = field(default_factory=lambda: FairShare(MAX_STREAMS))
    strangers: FairShare = field(default_factory=lambda: FairShare(STRANGER_STREAMS))
    unproven: FairShare = field(default_factory=lambda: FairShare(UNPROVEN_STREAMS))
    under_way: FairShare = field(default_factory=lambda: FairShare(UNDER_WAY_BYTES))

    def enclose(self, private: PrivateSwarm | None) -> None:
        """Give members of this swarm, by their invitations, their shares from now on; None: each peer its own."""
        self.private = private

    def begin(self, sender: PeerId) -> "QuestionShare":
        """A question of this sender begins. Raises ProtocolError if it has its share under way already."""
        admitted = self.private is None or self.private.admits(sender)
        known = admitted and self.knows(sender)
        pool = self.streams if known else self.strangers if admitted else self.unproven
        holder = self.private.holder_of(sender) if self.private else sender
        if not pool.take(holder):
            raise ProtocolError(Reason.BUSY, f"{pool.by_sender.get(holder, 0)} of {pool.used} streams are this peer's")
        return QuestionShare(sender, holder, pool, self.under_way, known)


@dataclass(slots=True)
class QuestionShare:
    """What one question has taken. `end` gives it back."""

    sender: PeerId
    holder: PeerId
    pool: FairShare
    under_way: FairShare
    known: bool = True
    blob_bytes: int = 0

    def reserve(self, blob_bytes: int) -> None:
        """For the question's blob, before it is read. Raises ProtocolError if the sender has its share already.

        No question that a stranger may ask has a blob, so none of its bytes is read.
        """
        if blob_bytes and not self.known:
            raise ProtocolError(Reason.STRANGER, "a blob from a peer without a record")
        if blob_bytes and not self.under_way.take(self.holder, blob_bytes):
            raise ProtocolError(Reason.BUSY, f"{self.under_way.used} bytes are under way")
        self.blob_bytes += blob_bytes

    def end(self) -> None:
        self.pool.give_back(self.holder)
        if self.blob_bytes:
            self.under_way.give_back(self.holder, self.blob_bytes)
