"""A private swarm as one of its members sees it: who has proved to be one, whose invitation counts no longer.

    asker  --MembershipProof(own proof)--> answerer    before any other question to a peer that is not known as a member
           <--MembershipProof(its proof)--              or Refused, with the founder's list where ours is revoked

Drivers (comm/net/) ask it before they read a question, and before they send one. What is kept of a peer is keyed by its
id, which libp2p proves anew on each connection. Records in the DHT bring the proof of their peer, so peers that have
read each other's records need no such question.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from decentral.comm.wire import identity, invitations, messages
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.invitations import NOTHING_REVOKED, Holding, Invitation, Permission, Revocations
from decentral.comm.wire.messages import ForwardRequest, MembershipProof, Message, Refused, RoundQuery
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.latest import keep_latest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

MOST_MEMBERS = 8192  # peers whose proof is remembered; beyond them, those that proved it longest ago prove it again
NONCE_BYTES, TAG_BYTES = 12, 16
MAX_SEAL_BYTES = invitations.MAX_PROOF_BYTES + 64  # what a member's record has more than any other
TELLS = {
    Reason.UNINVITED: "this swarm is private: ask its founder for an invitation, and give it with --invite FILE",
    Reason.EXPIRED: "the invitation has expired: ask the swarm's founder for a new one",
    Reason.REVOKED: "the swarm's founder has revoked the invitation",
    Reason.PERMISSION: "the invitation does not allow this",
}

NOT_COUNTED = (Reason.UNINVITED, Reason.EXPIRED, Reason.REVOKED)  # with these a peer refuses one that is no member
MAX_UNPROVEN_BYTES = invitations.MAX_PROOF_BYTES + 128  # header of a question of one who is not known as a member

OpenRecord = Callable[[str, PeerId, bytes, float], tuple[bytes, float]]  # a Signer's `open`


@dataclass(frozen=True, slots=True)
class ProvenMember:
    """A peer that has shown this proof."""

    proof: bytes
    invitation: Invitation


@dataclass(slots=True)
class PrivateSwarm:
    """What this peer shows, and whom it takes for a member. `now` gives the swarm's time."""

    own: PeerId
    holding: Holding
    now: Callable[[], Seconds]
    revocations: Revocations = NOTHING_REVOKED
    revoked_us: bool = False  # the founder's own list says so
    members: dict[PeerId, ProvenMember] = field(default_factory=dict)  # in the order in which they were verified
    proof: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.proof = self.holding.proof(self.own)
        self.revoked_us = self._ours.id in self.revocations.ids

    @property
    def run(self) -> RunId:
        return self._ours.run

    @property
    def _ours(self) -> Invitation:
        return self.holding.invitation

    @property
    def until(self) -> Seconds:
        """When our own invitation expires."""
        return self._ours.until

    def may(self, permission: Permission) -> bool:
        """Whether our own invitation allows it."""
        return self._ours.may.allows(permission)

    def over(self) -> Reason | None:
        """Why we are no member any more; None: we are one."""
        return self._counts(self._ours) if not self.revoked_us else Reason.REVOKED

    # Who is a member

    def refusal(self, peer: PeerId) -> Reason | None:
        """Why this peer is not taken for a member at present; None: it is."""
        member = self.members.get(peer)
        return Reason.UNINVITED if member is None else self._counts(member.invitation)

    def admits(self, peer: PeerId) -> bool:
        return self.refusal(peer) is None

    def holder_of(self, peer: PeerId) -> PeerId:
        """A name for the invitation that the peer is a member by: all that have the same one share what it may take."""
        member = self.members.get(peer)
        return PeerId(member.invitation.text()) if member else peer

    def check(self, sender: PeerId, message: Message) -> None:
        """Whether this peer may ask that. Raises ProtocolError, before anything of the question's blob is read."""
        if isinstance(message, MembershipProof):
            return
        reason = self.refusal(sender)
        if reason is None and not self.members[sender].invitation.may.allows(_needed(sender, message)):
            reason = Reason.PERMISSION
        if reason is not None:
            raise ProtocolError(reason, TELLS[reason])

    def verify(self, peer: PeerId, proof: bytes) -> Invitation:
        """The invitation that counts at present and that this peer proves to hold. Raises ProtocolError."""
        invitation = self._read(peer, proof)
        if (reason := self._counts(invitation)) is not None:
            raise ProtocolError(reason, TELLS[reason])
        return invitation

    def _read(self, peer: PeerId, proof: bytes) -> Invitation:
        """The invitation that the peer proves to hold, whether it counts at present or not. Raises ProtocolError."""
        known = self.members.get(peer)
        if known is not None and known.proof == proof:
            return known.invitation
        invitation = invitations.read_proof(proof, self.run, peer)
        keep_latest(self.members, peer, ProvenMember(proof, invitation), MOST_MEMBERS)
        return invitation

    def _counts(self, invitation: Invitation) -> Reason | None:
        if invitation.id in self.revocations.ids:
            return Reason.REVOKED
        return Reason.EXPIRED if self.now() >= invitation.until else None

    # Proofs on a connection

    def question(self) -> Envelope:
        """What we ask a peer before anything else."""
        return Envelope(MembershipProof(self.proof))

    def answer(self, sender: PeerId, question: MembershipProof) -> Envelope:
        """Our proof for one who has shown a good one, else a refusal. A revoked peer gets the founder's own word."""
        try:
            self.verify(sender, question.proof)
        except ProtocolError as error:
            revoked = self.revocations.packed if error.reason == Reason.REVOKED else b""
            return Envelope(Refused(error.reason, str(error)[:200]), revoked)
        return Envelope(MembershipProof(self.proof))

    def heard(self, peer: PeerId, answer: Envelope) -> None:
        """What a peer has answered to our proof. Raises ProtocolError if it is no member for us, or we none for it."""
        match answer.message:
            case MembershipProof(proof):
                self.verify(peer, proof)
                return
            case Refused(reason):
                if reason == Reason.REVOKED:
                    self.learn(answer.blob)
                if reason in (Reason.REVOKED, Reason.EXPIRED):
                    raise ProtocolError(reason, TELLS[Reason(reason)])
                tells = f"it takes no invitation to {self.run}, so it is in another swarm ({reason})"
                raise ProtocolError(Reason.UNINVITED, tells)
        raise ProtocolError(Reason.UNEXPECTED, "no proof")

    # Revocations

    def learn(self, packed: bytes) -> list[PeerId] | None:
        """Takes a list of revocations. The members that it excludes; None if it is not the founder's, or not newer."""
        try:
            found = Revocations.parse(packed, self.run, self._ours.founder)
        except ProtocolError:
            return None
        if found.number <= self.revocations.number:
            return None
        self.revocations = found
        self.revoked_us = self._ours.id in found.ids
        return [peer for peer, member in self.members.items() if member.invitation.id in found.ids]

    # Records in the DHT

    def hidden(self, key: str) -> str:
        """The key under which the DHT has the records of `key`: it tells nothing to others."""
        return hashlib.blake2b(key.encode(), key=self.holding.swarm_key, digest_size=32).hexdigest()

    def seal(self, key: str, peer: PeerId, record: bytes) -> bytes:
        """Our record as the DHT gets it: with our proof, and encrypted, so that only members read it.

        The nonce is a keyed hash of the content, which a signature makes unique: no random number is needed.
        """
        content: bytes = msgpack.packb([self.proof, record])
        own_key = self._record_key(key, peer)
        nonce = hashlib.blake2b(content, key=own_key, digest_size=NONCE_BYTES).digest()
        return nonce + ChaCha20Poly1305(own_key).encrypt(nonce, content, b"")

    def unseal(self, key: str, peer: PeerId, sealed: bytes, now: float, inner: OpenRecord) -> tuple[bytes, float]:
        """Body and expiry of the record of a peer that was invited. Raises ProtocolError if it is none of this swarm's.

        `inner` checks the peer's own signature, which names the proof: any member could make a proof of its invitation
        for another peer, and so give that peer a lesser one, or one that is about to be revoked.

        Nodes of the DHT ask no more: they refuse all records of a key together if they refuse one of them, and that
        must not depend on whether a revocation has reached them.
        """
        proof, record = self._decrypted(key, peer, sealed)
        opened = inner(_with_proof(key, proof), peer, record, now)
        self._read(peer, proof)
        return opened

    def _decrypted(self, key: str, peer: PeerId, sealed: bytes) -> tuple[bytes, bytes]:
        """A member's proof and record. Raises ProtocolError."""
        if not NONCE_BYTES + TAG_BYTES < len(sealed) <= identity.max_record_bytes(key) + MAX_SEAL_BYTES:
            raise ProtocolError(Reason.OVERSIZE, f"a sealed record of {len(sealed)} bytes")
        cipher = ChaCha20Poly1305(self._record_key(key, peer))
        try:
            opened = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], b"")
            proof, record = msgpack.unpackb(opened, use_list=False)
        except InvalidTag:
            raise ProtocolError(Reason.UNINVITED, "it was not sealed by a member") from None
        except Exception as error:  # msgpack raises a dozen kinds of error for garbage
            raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
        if type(proof) is not bytes or type(record) is not bytes:
            raise ProtocolError(Reason.GARBAGE, "not a record")
        return proof, record

    def open(self, key: str, peer: PeerId, sealed: bytes, now: float, inner: OpenRecord) -> tuple[bytes, float]:
        """Body and expiry of the record of a peer that may have one, and is a member at present. Raises ProtocolError.

        `inner` as for `unseal`.
        """
        opened = self.unseal(key, peer, sealed, now, inner)
        invitation = self.members[peer].invitation
        reason = self._counts(invitation)
        if reason is None and not (key == revoked_key(self.run) or invitation.may.allows(Permission.DONATE)):
            reason = Reason.PERMISSION
        if reason is not None:
            raise ProtocolError(reason, TELLS[reason])
        return opened

    def _record_key(self, key: str, peer: PeerId) -> bytes:
        named = f"record {key} {peer}".encode()
        return hashlib.blake2b(named, key=self.holding.swarm_key, digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class MemberSigner:
    """A Signer whose records bring the peer's proof, and can be read by members only."""

    inner: Signer
    private: PrivateSwarm

    @property
    def peer(self) -> PeerId:
        return self.inner.peer

    def seal(self, key: str, body: bytes, expires: float) -> bytes:
        own = self.inner.seal(_with_proof(key, self.private.proof), body, expires)
        return self.private.seal(key, self.peer, own)

    def open(self, key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
        return self.private.open(key, peer, record, now, self.inner.open)


def revoked_key(run: RunId) -> str:
    """The key of a private run's revocations in the DHT. Each that announces them has a subkey."""
    return f"{run}/revoked"


def may_train(private: PrivateSwarm | None, peer: PeerId) -> bool:
    """Whether the peer may train on data of its own, as far as we know its invitation; None: the swarm is public."""
    if private is None or peer == private.own:
        return private is None or private.may(Permission.TRAIN)
    member = private.members.get(peer)
    return member is None or member.invitation.may.allows(Permission.TRAIN)


def storable(private: PrivateSwarm | None) -> OpenRecord:
    """How a node of the DHT opens what it is to store or has found; None: it is a public swarm's."""
    if private is None:
        return identity.open_sealed
    return lambda key, peer, record, now: private.unseal(key, peer, record, now, identity.open_sealed)


def _with_proof(key: str, proof: bytes) -> str:
    """What a member signs its record for: the key, and which proof of its own travels with the record."""
    return f"{key}/{hashlib.blake2b(proof, digest_size=16).hexdigest()}"


def refuse_unproven() -> ProtocolError:
    """What one hears who has not proved to be a member."""
    return ProtocolError(Reason.UNINVITED, TELLS[Reason.UNINVITED])


def _needed(sender: PeerId, message: Message) -> Permission:
    """What an invitation has to allow for this question."""
    joins = isinstance(message, RoundQuery) and message.joining
    if isinstance(message, messages.Question) and message.for_lookers and not joins:
        return Permission.LOOK
    begins = isinstance(message, ForwardRequest) and message.origin == sender  # its own micro-batch
    return Permission.TRAIN if begins else Permission.DONATE
