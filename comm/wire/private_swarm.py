"""A private swarm as one member sees it: which peers are members, and which invitations are revoked.

Before the first question to a peer that is not known as a member, both peers exchange their proofs:

    asker     --MembershipProof(asker's proof)-->     answerer
    asker     <--MembershipProof(answerer's proof)--  answerer    if the answerer accepts the asker's proof
    asker     <--Refused--                            answerer    otherwise; with the founder's list of revocations if
                                                                  the asker's invitation is revoked

Start with `PrivateSwarm`. The network code (comm/net/) asks it whether a question may be read or sent. Members are
remembered by peer id, which libp2p proves on each connection. A record in the DHT includes the proof of its peer, so
two peers that have read each other's records do not exchange proofs.
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
from decentral.comm.wire.unpacking import read_msgpack
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.latest import keep_latest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

MOST_MEMBERS = 8192  # the proofs of at most this many peers are stored; then the oldest proof is forgotten
NONCE_BYTES, TAG_BYTES = 12, 16  # sizes of a nonce and a tag of ChaCha20-Poly1305 (RFC 8439)
TELLS = {  # by the reason of a refusal: the text for the user of the peer that was refused
    Reason.UNINVITED: "this swarm is private: ask its founder for an invitation, and give it with --invite FILE",
    Reason.EXPIRED: "the invitation has expired: ask the swarm's founder for a new one",
    Reason.REVOKED: "the swarm's founder has revoked the invitation",
    Reason.PERMISSION: "the invitation does not allow this",
}

# A peer that refuses our question for one of these reasons does not know us as a member, so we show it our proof again.
NOT_COUNTED = (Reason.UNINVITED, Reason.EXPIRED, Reason.REVOKED)
# A larger question is refused unread while its sender has not proved its membership.
MAX_UNPROVEN_BYTES = invitations.MAX_PROOF_BYTES + 128

OpenRecord = Callable[[str, PeerId, bytes, float], tuple[bytes, float]]


@dataclass(frozen=True, slots=True)
class ProvenMember:
    """A peer's verified proof of membership, and the invitation that the proof contains."""

    proof: bytes
    invitation: Invitation


@dataclass(slots=True)
class PrivateSwarm:
    """One member's view of its private swarm: its own invitation, the members that it knows, and the revocations."""

    own: PeerId
    holding: Holding
    now: Callable[[], Seconds]  # returns the swarm's common time in Unix seconds
    revocations: Revocations = NOTHING_REVOKED
    revoked_us: bool = False
    members: dict[PeerId, ProvenMember] = field(default_factory=dict)  # the proof that was verified first comes first
    proof: bytes = field(init=False)  # our own proof, which we show to other peers so that they accept us as a member

    def __post_init__(self) -> None:
        """Make our own proof, and check whether our own invitation is revoked."""
        self.proof = self.holding.proof(self.own)
        self.revoked_us = self._ours.id in self.revocations.ids

    @property
    def run(self) -> RunId:
        """Return the name of this swarm's run."""
        return self._ours.run

    @property
    def _ours(self) -> Invitation:
        return self.holding.invitation

    @property
    def until(self) -> Seconds:
        """Return when our own invitation expires, in unix seconds."""
        return self._ours.until

    def may(self, permission: Permission) -> bool:
        """Return whether our own invitation includes this permission."""
        return self._ours.may.allows(permission)

    def over(self) -> Reason | None:
        """Return why our own invitation is no longer valid: REVOKED or EXPIRED; None while it is valid."""
        return self._counts(self._ours) if not self.revoked_us else Reason.REVOKED

    def refusal(self, peer: PeerId) -> Reason | None:
        """Return why we do not treat a peer as a member: UNINVITED, EXPIRED or REVOKED; None if it is a member."""
        member = self.members.get(peer)
        return Reason.UNINVITED if member is None else self._counts(member.invitation)

    def admits(self, peer: PeerId) -> bool:
        """Return whether we know a peer as a member whose invitation is valid now."""
        return self.refusal(peer) is None

    def holder_of(self, peer: PeerId) -> PeerId:
        """Return the id under which a peer's use of our resources is counted.

        It is the id of the peer's invitation, so that all peers with the same invitation together get as much as one
        peer. If the peer has not shown an invitation, it is the peer's own id.
        """
        member = self.members.get(peer)
        return PeerId(member.invitation.text()) if member else peer

    def check(self, sender: PeerId, message: Message) -> None:
        """Check that this peer may ask this question; any peer may send a MembershipProof.

        Call this before the question's blob is read.

        Raises:
            ProtocolError: If the sender is not known as a member, or its invitation does not allow the question.
        """
        if isinstance(message, MembershipProof):
            return
        reason = self.refusal(sender)
        if reason is None and not self.members[sender].invitation.may.allows(_needed(sender, message)):
            reason = Reason.PERMISSION
        if reason is not None:
            raise ProtocolError(reason, TELLS[reason])

    def verify(self, peer: PeerId, proof: bytes) -> Invitation:
        """Verify a peer's proof, remember the proof, and return its invitation.

        Raises:
            ProtocolError: If the proof is not valid for this peer and run, or its invitation is expired or revoked. In
                the second case the proof is remembered all the same.
        """
        invitation = self._read(peer, proof)
        if (reason := self._counts(invitation)) is not None:
            raise ProtocolError(reason, TELLS[reason])
        return invitation

    def _read(self, peer: PeerId, proof: bytes) -> Invitation:
        """Verify and remember a proof, and return its invitation, even if the invitation is expired or revoked.

        Raises:
            ProtocolError: If the proof is not valid for this peer and run.
        """
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

    def question(self) -> Envelope:
        """Return the question that shows our proof to another peer."""
        return Envelope(MembershipProof(self.proof))

    def answer(self, sender: PeerId, question: MembershipProof) -> Envelope:
        """Return our answer to a peer's proof: our own proof if the sender's is valid, otherwise a refusal.

        If the sender's invitation is revoked, the refusal's blob is the founder's list of revocations.
        """
        try:
            self.verify(sender, question.proof)
        except ProtocolError as error:
            revoked = self.revocations.packed if error.reason == Reason.REVOKED else b""
            return Envelope(Refused(error.reason, str(error)[:200]), revoked)
        return Envelope(MembershipProof(self.proof))

    def heard(self, peer: PeerId, answer: Envelope) -> None:
        """Process a peer's answer to our proof: remember the peer's proof, or adopt the revocations in a refusal.

        Raises:
            ProtocolError: If the answer is a refusal, a proof that is not valid, or any other message.
        """
        match answer.message:
            case MembershipProof(proof):
                self.verify(peer, proof)
                return
            case Refused(reason):
                if reason == Reason.REVOKED:
                    self.learn(answer.blob)
                if reason in (Reason.REVOKED, Reason.EXPIRED):
                    raise ProtocolError(reason, TELLS[Reason(reason)])
                tells = f"the peer does not accept invitations to {self.run}, so it is in another swarm ({reason})"
                raise ProtocolError(Reason.UNINVITED, tells)
        raise ProtocolError(Reason.UNEXPECTED, f"expected a MembershipProof; got a {type(answer.message).__name__}")

    def learn(self, packed: bytes) -> list[PeerId] | None:
        """Adopt a list of revocations if the founder signed it and its number is higher than that of our present list.

        Args:
            packed: The list in the form in which it is sent, with a signature.

        Returns:
            The peers that we know as members and whose invitations the list revokes; None if the list is not adopted.
        """
        try:
            found = Revocations.parse(packed, self.run, self._ours.founder)
        except ProtocolError:
            return None
        if found.number <= self.revocations.number:
            return None
        self.revocations = found
        self.revoked_us = self._ours.id in found.ids
        return [peer for peer, member in self.members.items() if member.invitation.id in found.ids]

    def hidden(self, key: str) -> str:
        """Return the DHT key under which members store records of `key`: a hash that only members can compute."""
        return hashlib.blake2b(key.encode(), key=self.holding.swarm_key, digest_size=32).hexdigest()

    def seal(self, key: str, peer: PeerId, record: bytes) -> bytes:
        """Return our signed record and our proof, encrypted (ChaCha20-Poly1305) so that only members can read them.

        The nonce is a keyed hash of the content. The content includes a randomised signature, so each record has
        different content, and a different nonce.
        """
        content: bytes = msgpack.packb([self.proof, record])
        own_key = self._record_key(key, peer)
        nonce = hashlib.blake2b(content, key=own_key, digest_size=NONCE_BYTES).digest()
        return nonce + ChaCha20Poly1305(own_key).encrypt(nonce, content, b"")

    def unseal(self, key: str, peer: PeerId, sealed: bytes, now: float, inner: OpenRecord) -> tuple[bytes, float]:
        """Decrypt an invited peer's record, return its body and expiry (unix seconds), and remember the proof in it.

        The invitation may be expired or revoked. A node of the DHT must not refuse such a record: it could only refuse
        all records under the key together, and a revocation reaches some nodes later than others.

        Args:
            key: The DHT key, not yet replaced by `hidden`.
            peer: The peer that the record names.
            sealed: The record, as that peer's `seal` returned it.
            now: Unix seconds.
            inner: Checks the peer's own signature. This signature also covers the proof. Otherwise any member could
                publish a proof of its own invitation in the name of another peer, and so lower that peer's permissions.

        Raises:
            ProtocolError: If the record is not of this swarm, not signed by the peer, or expired.
        """
        proof, record = self._decrypted(key, peer, sealed)
        opened = inner(_with_proof(key, proof), peer, record, now)
        self._read(peer, proof)
        return opened

    def bare(self, key: str, peer: PeerId, sealed: bytes) -> tuple[str, bytes]:
        """Decrypt a sealed record; return the signed record, and the key with which its signature was made.

        The key is the DHT key `key`, and a digest of the member's proof.

        Raises:
            ProtocolError: If the record is malformed, or no member of this swarm encrypted it.
        """
        proof, record = self._decrypted(key, peer, sealed)
        return _with_proof(key, proof), record

    def _decrypted(self, key: str, peer: PeerId, sealed: bytes) -> tuple[bytes, bytes]:
        """Return the proof and the signed record inside a sealed record.

        Raises:
            ProtocolError: If the sealed record is too small, too large, malformed, or not sealed by a member.
        """
        least, most = NONCE_BYTES + TAG_BYTES + 1, identity.max_record_bytes(key) + invitations.MAX_SEAL_BYTES
        if not least <= len(sealed) <= most:
            said = f"a sealed record must have {least} to {most} bytes; got {len(sealed)}"
            raise ProtocolError(Reason.OVERSIZE, said)
        cipher = ChaCha20Poly1305(self._record_key(key, peer))
        try:
            opened = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], b"")
            proof, record = read_msgpack(opened, max_array_len=2)
        except InvalidTag:
            raise ProtocolError(Reason.UNINVITED, "the record was not encrypted by a member") from None
        except Exception as error:  # for malformed bytes, msgpack raises exceptions of many classes
            raise ProtocolError(Reason.GARBAGE, f"the record is not valid msgpack ({type(error).__name__})") from None
        if type(proof) is not bytes or type(record) is not bytes:
            raise ProtocolError(Reason.GARBAGE, "a sealed record must contain a proof and a signed record")
        return proof, record

    def open(self, key: str, peer: PeerId, sealed: bytes, now: float, inner: OpenRecord) -> tuple[bytes, float]:
        """Return a record's body and expiry (unix s) if the peer's invitation allows the record; remember its proof.

        Any member may publish a list of revocations. All other records need Permission.DONATE.

        Raises:
            ProtocolError: If `unseal` raises it, or if the invitation is expired or revoked, or lacks the permission.
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
    """The Signer for a private swarm: its records include our proof, and are encrypted for members of the swarm."""

    inner: Signer
    private: PrivateSwarm

    @property
    def peer(self) -> PeerId:
        """Return this peer's id."""
        return self.inner.peer

    def seal(self, key: str, body: bytes, expires: float) -> bytes:
        """Return a signed and encrypted record for the DHT, which expires at unix time `expires`."""
        own = self.inner.seal(_with_proof(key, self.private.proof), body, expires)
        return self.private.seal(key, self.peer, own)

    def bare(self, key: str, peer: PeerId, sealed: bytes) -> tuple[str, bytes]:
        """Decrypt a sealed record, as `PrivateSwarm.bare` does; the signature is not verified.

        Raises:
            ProtocolError: If the record cannot be decrypted.
        """
        return self.private.bare(key, peer, sealed)

    def open(self, key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
        """Return the body and expiry (unix seconds) of a member's record.

        Raises:
            ProtocolError: If the record is malformed, not of this swarm, not signed by the peer, or expired; or if the
                peer's invitation is expired or revoked, or does not allow the record.
        """
        return self.private.open(key, peer, record, now, self.inner.open)


def share_holder(private: PrivateSwarm | None, peer: PeerId) -> PeerId:
    """Return the id under which a peer's use of our resources is counted: `holder_of` if private, else its own id."""
    return private.holder_of(peer) if private else peer


def revoked_key(run: RunId) -> str:
    """Return the DHT key under which the peers of a private run publish copies of the list of revocations."""
    return f"{run}/revoked"


def may_train(private: PrivateSwarm | None, peer: PeerId) -> bool:
    """Return whether a peer may train on its own data.

    Args:
        private: Our private swarm; None if the swarm is public. Every peer of a public swarm may train.
        peer: This peer or another peer. If we do not know the peer's invitation, we assume that the peer may train.
    """
    if private is None or peer == private.own:
        return private is None or private.may(Permission.TRAIN)
    member = private.members.get(peer)
    return member is None or member.invitation.may.allows(Permission.TRAIN)


def storable(private: PrivateSwarm | None) -> OpenRecord:
    """Return the check that our DHT node applies to a record before it stores or returns it.

    Args:
        private: Our private swarm; None if the swarm is public.
    """
    if private is None:
        return identity.open_sealed
    return lambda key, peer, record, now: private.unseal(key, peer, record, now, identity.open_sealed)


def _with_proof(key: str, proof: bytes) -> str:
    """Return the text that a member signs together with its record: the DHT key, and a digest of its proof."""
    return f"{key}/{hashlib.blake2b(proof, digest_size=16).hexdigest()}"


def refuse_unproven() -> ProtocolError:
    """Return the error with which we refuse a question of a peer that is not known as a member."""
    return ProtocolError(Reason.UNINVITED, TELLS[Reason.UNINVITED])


def _needed(sender: PeerId, message: Message) -> Permission:
    """Return the permission that the sender's invitation must include for this question."""
    joins = isinstance(message, RoundQuery) and message.joining
    if isinstance(message, messages.Question) and message.for_lookers and not joins:
        return Permission.LOOK
    begins = isinstance(message, ForwardRequest) and message.origin == sender
    return Permission.TRAIN if begins else Permission.DONATE
