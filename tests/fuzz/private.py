"""Bytes of a private swarm: proofs, lists of revocations, sealed records, and the files of members and founders.

The founder's and the members' keys are drawn from a known seed, so anybody can make them, and no real swarm has them.
"""

import contextlib
import io
from functools import cache

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from decentral.comm.wire import codec, invitations
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import FounderKeys, Holding, Permission, Revocations
from decentral.comm.wire.messages import Hello, MembershipProof
from decentral.comm.wire.private_swarm import MemberSigner, PrivateSwarm, revoked_key
from decentral.commands import invite
from decentral.core import rng
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import invitation_files
from decentral.peers.startup.invitation_files import FounderFile
from decentral.sim.virtual_signer import VirtualSigner
from tests.fuzz.files import folder, written

NOW = 1.7e9
A, B = PeerId("A"), PeerId("B")  # who reads, and who has sent
FOUNDER = FounderKeys.create("fuzzed", rng.stream(0, "founder").randbytes)
OTHER_FOUNDER = FounderKeys.create("fuzzed", rng.stream(1, "founder").randbytes)
RECORDS = f"{FOUNDER.run}/peers"
SEALED = 1  # the first byte of a record that a member, who has the swarm's key, has sealed


@cache
def holding(
    name: str, until: float = NOW + 3600, may: Permission = Permission.TRAIN, by: FounderKeys = FOUNDER
) -> Holding:
    """An invitation for this name, always the same."""
    return by.invite(name, until, may, rng.stream(0, "invitation", name).randbytes)


REVOKED = holding("revoked")
LIST = FOUNDER.revoke(3, frozenset({REVOKED.invitation.id}))  # what A knows


def member(peer: PeerId, one: Holding | None = None, known: Revocations = LIST) -> PrivateSwarm:
    return PrivateSwarm(peer, one or holding(peer), lambda: NOW, known)


@cache
def signer(peer: PeerId) -> MemberSigner:
    """How a member of this name seals records."""
    return MemberSigner(VirtualSigner(peer), member(peer))


def sealed(content: bytes) -> bytes:
    """What B puts into the DHT when it seals any bytes in the place of its proof and its record."""
    nonce = bytes(12)
    return nonce + ChaCha20Poly1305(member(B)._record_key(RECORDS, B)).encrypt(nonce, content, b"")


def proof(data: bytes) -> None:
    """Who has shown a proof that counts is a member, and may look at least."""
    swarm = member(A)
    assert swarm.verify(B, data).run == FOUNDER.run
    swarm.check(B, Hello(FOUNDER.run))
    assert swarm.admits(B)


def membership(data: bytes) -> None:
    """A header and a blob, as the first question of a stranger, and as the answer to ours."""
    size = int.from_bytes(data[:2], "big")
    message, _ = codec.decode(data[2 : 2 + size])
    swarm = member(A)
    if isinstance(message, MembershipProof):
        said = swarm.answer(B, message)
        codec.decode(codec.encode(said.message, len(said.blob)))
    else:
        assert _is_refused(swarm, Envelope(message)), "one who has proved nothing asks nothing"
    member(A).heard(B, Envelope(message, data[2 + size :]))


def _is_refused(swarm: PrivateSwarm, envelope: Envelope) -> bool:
    try:
        swarm.check(B, envelope.message)
    except ProtocolError:
        return True
    return False


def revocations(data: bytes) -> None:
    """A list that is not the founder's changes nothing, whether it was heard or read from our folder."""
    swarm = member(A)
    learned = swarm.learn(data)
    written("revoked", data)
    kept = invitation_files.member(folder(), holding(A), A, SwarmClock()).revocations
    assert swarm.revocations.packed == (LIST.packed if learned is None else data)
    assert kept.packed == data or kept is invitations.NOTHING_REVOKED
    Revocations.parse(data, FOUNDER.run, FOUNDER.public)
    assert kept.packed == data


def private_record(data: bytes) -> None:
    """A record as it comes, or one whose content a member has chosen; the peer's own signature is not looked at."""
    swarm = member(A)
    value = sealed(data[1:]) if data[:1] == bytes([SEALED]) else data[1:]
    record, _ = swarm.open(RECORDS, B, value, NOW, lambda key, peer, inner, now: (inner, now))
    assert isinstance(record, bytes)
    assert swarm.admits(B)
    assert swarm.members[B].invitation.may.allows(Permission.DONATE)


def revoked_record(data: bytes) -> bytes:
    """A list of revocations as B seals it: the key says what a record is about."""
    return signer(B).seal(revoked_key(FOUNDER.run), data, NOW + 60)


def invitation_file(data: bytes) -> None:
    """With an invitation that is accepted its holder can prove that it is a member."""
    found = invitation_files.read_holding(written("holder.invite", data))
    try:
        invitations.read_proof(found.proof(B), found.invitation.run, B)
    except ProtocolError as error:
        raise AssertionError("a holder without a proof") from error
    assert invitation_files.described(found.invitation, NOW)


def founder_file(data: bytes) -> None:
    """A file that is accepted can be shown, and its founder can invite and revoke."""
    written("founder.json", data)
    with FounderFile.open(folder()) as founder:
        ids = [one["id"] for one in founder.invited]
        one = founder.invite("somebody", NOW + 60, Permission.LOOK).invitation
        one.require_founder()
        for number in (*ids[:2], one.text()):
            found = founder.revoke(bytes.fromhex(number), NOW)
            Revocations.parse(found.packed, founder.keys.run, founder.keys.public)
    with contextlib.redirect_stdout(io.StringIO()):
        assert invite.main(["--state-dir", str(folder()), "--list"]) == 0
