"""The founder of the private swarm in which a node is fuzzed, and what liars make of the lists of revocations."""

from collections.abc import Sequence
from random import Random

from decentral.comm.wire.invitations import NOTHING_REVOKED, Revocations
from decentral.comm.wire.messages import Message
from decentral.comm.wire.private_swarm import PrivateSwarm, revoked_key
from decentral.comm.wire.transport import Found
from decentral.core.ids import PeerId
from tests.fuzz import grammar
from tests.fuzz.private import FOUNDER, OTHER_FOUNDER, holding, signer

NEW_LIST, OURSELVES = 0.3, 0.05  # share of lookups before which somebody is revoked; of those, that may be the node
SPOILT = 0.1  # share of lists, and of records around them, that are damaged


class Founder:
    """A founder who revokes now and then, in the swarm of a node that is fuzzed, and liars who pass on his lists."""

    def __init__(self, chance: Random, own: PrivateSwarm) -> None:
        self.chance, self.own = chance, own
        self.lists = [NOTHING_REVOKED]  # in the order of their numbers

    def admit(self, peer: PeerId, message: Message) -> None:
        """What a driver does before it reads a question. Raises ProtocolError."""
        if not self.own.admits(peer):
            self.own.verify(peer, signer(peer).private.proof)
        self.own.check(peer, message)

    def found(self, crowd: Sequence[PeerId], now: float) -> Found:
        """What a lookup of revocations finds: lists of any age, some spoilt, that the crowd has announced."""
        if self.chance.random() < NEW_LIST:
            revoked = self.chance.choice((*crowd, self.own.own) if self.chance.random() < OURSELVES else crowd)
            ids = self.lists[-1].ids | {holding(revoked).invitation.id}
            self.lists.append(FOUNDER.revoke(len(self.lists), ids))
        key, values = revoked_key(self.own.run), dict[str, bytes]()
        for peer in self.chance.sample(crowd, self.chance.randrange(1, len(crowd))):
            made = OTHER_FOUNDER.revoke(1 << 61, frozenset()) if self.chance.random() < 0.05 else None
            packed = (made or self.chance.choice(self.lists[-4:])).packed
            packed = grammar.damaged(self.chance, packed) if self.chance.random() < SPOILT else packed
            value = signer(peer).seal(key, packed, now + self.chance.choice((-1.0, 1.0, 600.0, 3600.0)))
            values[peer] = grammar.damaged(self.chance, value) if self.chance.random() < SPOILT else value
        return Found(key, values)

    def excluded(self) -> frozenset[bytes]:
        """The invitations that the latest list names which the node has read."""
        return self.own.revocations.ids

    def made(self, one: Revocations) -> bool:
        """Whether the founder has said just that."""
        return any((one.number, one.ids) == (known.number, known.ids) for known in self.lists)
