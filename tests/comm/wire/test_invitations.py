"""A proof counts for one peer of one run, whose founder has signed the invitation; nothing else is one."""

import os
from dataclasses import replace

import msgpack
import pytest

from decentral.comm.wire import invitations
from decentral.comm.wire.invitations import (
    MAX_HOLDER_CHARS,
    MAX_PROOF_BYTES,
    MOST_REVOKED,
    FounderKeys,
    Holding,
    Permission,
    Revocations,
    is_private,
    read_proof,
)
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from tests.comm.wire.invited import NOW, founder

A, B = PeerId("QmA"), PeerId("QmB")


def holding(by: FounderKeys | None = None) -> Holding:
    return (by or founder()).invite("ann", NOW, Permission.TRAIN, os.urandom)


def refusal(proof: bytes, peer: PeerId = A, run: RunId | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        read_proof(proof, run or founder().run, peer)
    return caught.value.reason


def test_a_proof_tells_the_invitation_that_its_peer_holds() -> None:
    one = holding()
    assert read_proof(one.proof(A), founder().run, A) == one.invitation


def test_a_proof_is_worth_nothing_to_another_peer() -> None:
    assert refusal(holding().proof(A), B) == "signature"


def test_a_certificate_without_its_key_proves_nothing() -> None:
    """Whoever has seen a proof knows the invitation, but cannot sign for a peer id of its own."""
    stolen = replace(holding(), secret=os.urandom(32))
    assert refusal(stolen.proof(B), B) == "signature"


def test_a_proof_of_another_run_is_none() -> None:
    assert refusal(holding(founder("other")).proof(A)) == "uninvited"


def test_nobody_else_can_found_the_run() -> None:
    """An impostor names the run as its own and signs with its own key, which the run's name has not the hash of."""
    impostor = replace(founder("other"), run=founder().run)
    assert refusal(holding(impostor).proof(A)) == "uninvited"


def test_an_impostor_that_names_the_founder_s_key_cannot_sign_for_it() -> None:
    one = holding(replace(founder("other"), run=founder().run))
    forged = replace(one, invitation=replace(one.invitation, founder=founder().public))
    assert refusal(forged.proof(A)) == "signature"


@pytest.mark.parametrize(
    "change", [{"until": NOW + 1e6}, {"may": Permission.TRAIN}, {"holder": "eve"}, {"id": bytes(8)}]
)
def test_a_holder_changes_nothing_in_its_invitation(change: dict[str, object]) -> None:
    one = founder().invite("ann", NOW, Permission.LOOK, os.urandom)
    changed = replace(one, invitation=replace(one.invitation, **change))  # type: ignore[arg-type]
    assert refusal(changed.proof(A)) == "signature"


@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("value", [b"", "", 0, None, -1.0, float("nan"), "x" * 200, bytes(64)])
def test_a_proof_with_any_other_field_is_refused(position: int, value: object) -> None:
    parts = list(msgpack.unpackb(holding().proof(A)))
    parts[position] = value
    refusal(msgpack.packb(parts))


@pytest.mark.parametrize("proof", [b"", b"\xc1", b"\x90", msgpack.packb("proof"), bytes(MAX_PROOF_BYTES + 1)])
def test_garbage_is_no_proof(proof: bytes) -> None:
    assert refusal(proof) in ("garbage", "oversize")


def test_the_largest_proof_fits_its_bound() -> None:
    keys = FounderKeys.create("n" * 37, os.urandom)
    one = keys.invite("\u0416" * MAX_HOLDER_CHARS, NOW, Permission.DONATE, os.urandom)
    assert len(one.proof(PeerId("Q" * 46))) <= MAX_PROOF_BYTES
    assert len(keys.run) <= 64


def test_a_private_run_is_told_by_its_name() -> None:
    assert is_private(founder().run)
    assert not is_private(RunId("stdlib-gpt-3fa2c1"))


@pytest.mark.parametrize("name", ["", "-", "A", "a b", "../a", "a\n", "[red]", "\u65e5\u672c", "a" * 40])
def test_an_invitation_names_a_run_as_a_config_may_name_it(name: str) -> None:
    one = holding(FounderKeys.create(name, os.urandom))
    assert refusal(one.proof(A), run=one.invitation.run) == "fields"


def test_revocations_come_back_as_they_were() -> None:
    ids = frozenset({os.urandom(8), os.urandom(8)})
    listed = founder().revoke(3, ids)
    assert Revocations.parse(listed.packed, founder().run, founder().public) == listed


@pytest.mark.parametrize("whose", ["another founder's", "another run's", "changed", "too many", "number 0", "garbage"])
def test_any_other_list_of_revocations_is_refused(whose: str) -> None:
    packed = {
        "another founder's": replace(founder("other"), run=founder().run).revoke(1, frozenset()).packed,
        "another run's": replace(founder(), run=RunId("other")).revoke(1, frozenset()).packed,
        "changed": founder().revoke(1, frozenset()).packed.replace(b"\x01", b"\x02", 1),
        "too many": founder().revoke(1, frozenset(n.to_bytes(8) for n in range(MOST_REVOKED + 1))).packed,
        "number 0": founder().revoke(0, frozenset()).packed,
        "garbage": b"\xc1",
    }[whose]
    with pytest.raises(ProtocolError):
        Revocations.parse(packed, founder().run, founder().public)


def test_the_longest_list_fits_its_bound() -> None:
    full = founder().revoke(1, frozenset(n.to_bytes(8) for n in range(MOST_REVOKED)))
    assert len(full.packed) <= invitations.MAX_REVOCATIONS_BYTES
    assert Revocations.parse(full.packed, founder().run, founder().public).ids == full.ids


def test_what_is_allowed_includes_what_is_less() -> None:
    assert Permission.TRAIN.allows(Permission.DONATE)
    assert Permission.DONATE.allows(Permission.LOOK)
    assert not Permission.LOOK.allows(Permission.DONATE)
    assert not Permission.DONATE.allows(Permission.TRAIN)
