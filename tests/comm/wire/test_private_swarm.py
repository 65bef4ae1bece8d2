"""Whom a member of a private swarm takes for a member, what it lets each ask, and which records it opens."""

from dataclasses import replace
from typing import Any

import pytest

from decentral.comm.wire import messages
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import Permission
from decentral.comm.wire.messages import ForwardRequest, Hello, MembershipProof, Message, Refused, RoundQuery
from decentral.comm.wire.private_swarm import MOST_MEMBERS, MemberSigner, PrivateSwarm, storable
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.sim.virtual_signer import VirtualSigner
from tests.comm.wire.invited import HOUR_S, NOW, founder, member

A, B = PeerId("QmA"), PeerId("QmB")
KEY = f"{founder().run}/peers"
REVOKED_KEY = f"{founder().run}/revoked"
FORWARD = ForwardRequest(founder().run, B, 1, 0, 1, 1.0, 1.0, ())


def introduced(ours: PrivateSwarm, theirs: PrivateSwarm) -> Envelope:
    """What we answer to their proof."""
    question = theirs.question().message
    assert isinstance(question, MembershipProof)
    return ours.answer(theirs.own, question)


def refusal(ours: PrivateSwarm, message: Message, sender: PeerId = B) -> str:
    with pytest.raises(ProtocolError) as caught:
        ours.check(sender, message)
    return caught.value.reason


def said(answer: Envelope) -> str:
    return answer.message.reason if isinstance(answer.message, Refused) else "proof"


def revoke(*peers: PrivateSwarm, number: int = 1) -> bytes:
    return founder().revoke(number, frozenset(one.holding.invitation.id for one in peers)).packed


def test_both_prove_to_be_members_and_then_may_ask() -> None:
    a, b = member("QmA"), member("QmB")
    b.heard(A, introduced(a, b))
    a.check(B, Hello())
    b.check(A, Hello())


def test_whoever_has_proved_nothing_may_only_prove_it() -> None:
    a = member("QmA")
    assert refusal(a, Hello()) == "uninvited"
    a.check(B, MembershipProof(b"whatever"))


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (member("QmB", until=NOW), "expired"),
        (member("QmB", by=founder("other")), "uninvited"),
        (member("QmOther"), "signature"),
    ],
)
def test_a_proof_that_does_not_count_is_refused_and_the_peer_stays_out(theirs: PrivateSwarm, reason: str) -> None:
    a = member("QmA")
    proof = theirs.question().message
    assert isinstance(proof, MembershipProof)
    assert said(a.answer(B, proof)) == reason
    assert not a.admits(B)


def test_an_invitation_counts_until_it_ends_and_is_looked_at_with_each_question() -> None:
    times = [NOW]
    a, b = member("QmA", now=lambda: times[0]), member("QmB")
    introduced(a, b)
    times[0] = NOW + HOUR_S - 1
    a.check(B, Hello())
    times[0] = NOW + HOUR_S
    assert refusal(a, Hello()) == "expired"


def test_an_asker_whose_clock_is_an_hour_ahead_is_judged_by_ours() -> None:
    a, b = member("QmA"), member("QmB", until=NOW + HOUR_S / 2, now=lambda: NOW + HOUR_S)
    assert said(introduced(a, b)) == "proof"
    a.check(B, Hello())


def test_a_peer_that_proves_nothing_is_asked_nothing() -> None:
    b = member("QmB")
    for answer in (Envelope(messages.Welcome("r", "")), Envelope(Refused("unexpected")), Envelope(Refused("deadline"))):
        with pytest.raises(ProtocolError):
            b.heard(A, answer)
    assert not b.admits(A)


def test_a_revoked_peer_is_out_and_is_told_so_in_the_founder_s_own_words() -> None:
    a, b = member("QmA"), member("QmB")
    introduced(a, b)
    assert a.learn(revoke(b)) == [B]
    assert refusal(a, Hello()) == "revoked"
    answer = introduced(a, b)
    assert said(answer) == "revoked"
    with pytest.raises(ProtocolError):
        b.heard(A, answer)
    assert b.over() == "revoked"


def test_nobody_but_the_founder_makes_a_peer_believe_that_it_is_revoked() -> None:
    b = member("QmB")
    forged = replace(founder("other"), run=founder().run).revoke(9, frozenset({b.holding.invitation.id})).packed
    for blob in (b"", forged):
        with pytest.raises(ProtocolError):
            b.heard(A, Envelope(Refused("revoked"), blob))
    assert b.over() is None


def test_an_older_list_of_revocations_takes_nothing_back() -> None:
    a, b = member("QmA"), member("QmB")
    introduced(a, b)
    assert a.learn(revoke(b, number=2)) == [B]
    assert a.learn(revoke(number=1)) is None
    assert a.learn(revoke(number=2)) is None
    assert refusal(a, Hello()) == "revoked"


def test_a_new_invitation_takes_the_place_of_one_that_was_revoked() -> None:
    a, b = member("QmA"), member("QmB")
    a.learn(revoke(b))
    assert said(introduced(a, b)) == "revoked"
    assert said(introduced(a, member("QmB"))) == "proof"
    a.check(B, Hello())


@pytest.mark.parametrize(
    ("may", "message", "allowed"),
    [
        (Permission.LOOK, Hello(), True),
        (Permission.LOOK, messages.StateRequest(founder().run, 0, 0, 1), True),
        (Permission.LOOK, RoundQuery(founder().run, 0, 0, 1, joining=False), True),
        (Permission.LOOK, RoundQuery(founder().run, 0, 0, 1, joining=True), False),
        (Permission.LOOK, messages.Pull(founder().run, 0, 0, 0.0, 0.0), False),
        (Permission.LOOK, FORWARD, False),
        (Permission.DONATE, messages.Pull(founder().run, 0, 0, 0.0, 0.0), True),
        (Permission.DONATE, replace(FORWARD, origin="QmC"), True),
        (Permission.DONATE, FORWARD, False),
        (Permission.TRAIN, FORWARD, True),
    ],
)
def test_an_invitation_allows_what_it_says(may: Permission, message: Message, allowed: bool) -> None:
    a = member("QmA")
    introduced(a, member("QmB", may=may))
    if allowed:
        a.check(B, message)
    else:
        assert refusal(a, message) == "permission"


def test_so_many_members_are_remembered_and_the_others_prove_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentral.comm.wire.private_swarm.MOST_MEMBERS", 2)
    a = member("QmA")
    for name in ("Qm1", "Qm2", "Qm3"):
        introduced(a, member(name))
    assert len(a.members) == 2 < MOST_MEMBERS
    assert [a.admits(PeerId(name)) for name in ("Qm1", "Qm2", "Qm3")] == [False, True, True]


# Records


def signer(private: PrivateSwarm) -> MemberSigner:
    return MemberSigner(VirtualSigner(private.own), private)


def opened(reader: PrivateSwarm, value: bytes, key: str = KEY, peer: PeerId = B) -> Any:
    try:
        return signer(reader).open(key, peer, value, NOW)[0]
    except ProtocolError as error:
        return error.reason


def test_a_member_s_record_is_opened_by_members_and_makes_its_peer_known() -> None:
    a, b = member("QmA"), member("QmB")
    assert opened(a, signer(b).seal(KEY, b"body", NOW + 60)) == b"body"
    assert a.admits(B)


def test_a_member_can_show_another_s_record_to_whoever_has_no_invitation() -> None:
    a, b = member("QmA"), member("QmB")
    key, bare = signer(a).bare(KEY, B, signer(b).seal(KEY, b"body", NOW + 60))
    assert VirtualSigner(PeerId("QmAnyone")).open(key, B, bare, NOW)[0] == b"body"
    with pytest.raises(ProtocolError, match="uninvited"):
        signer(member("QmC", by=founder("other"))).bare(KEY, B, signer(b).seal(KEY, b"body", NOW + 60))


def test_nobody_else_reads_a_record() -> None:
    value = signer(member("QmB")).seal(KEY, b"body of a record", NOW + 60)
    assert b"body" not in value
    assert opened(member("QmA", by=founder("other")), value) == "uninvited"


@pytest.mark.parametrize("forgery", ["another key", "another peer", "changed", "cut", "empty", "plain"])
def test_any_other_record_is_refused(forgery: str) -> None:
    value = signer(member("QmB")).seal(KEY, b"body", NOW + 60)
    a = member("QmA")
    refused = {
        "another key": lambda: opened(a, value, key=f"{founder().run}/plan"),
        "another peer": lambda: opened(a, value, peer=PeerId("QmC")),
        "changed": lambda: opened(a, value[:-1] + bytes([value[-1] ^ 1])),
        "cut": lambda: opened(a, value[:20]),
        "empty": lambda: opened(a, b""),
        "plain": lambda: opened(a, VirtualSigner(B).seal(KEY, b"body", NOW + 60)),
    }[forgery]()
    assert refused in ("uninvited", "oversize")


def test_a_member_cannot_bring_another_s_proof() -> None:
    """One that knows the swarm's key, as every member does, seals a record with the proof of somebody else."""
    a, b, thief = member("QmA"), member("QmB"), member("QmThief")
    thief.proof = b.proof
    assert opened(a, signer(thief).seal(KEY, b"body", NOW + 60), peer=PeerId("QmThief")) == "signature"


@pytest.mark.parametrize("record", ["made up", "the peer's own"])
def test_a_member_cannot_put_its_invitation_in_the_place_of_another_s(record: str) -> None:
    """It can make a proof of its own invitation for any peer, and read and seal records, as every member can."""
    a, b, thief = member("QmA"), member("QmB"), member("QmThief", may=Permission.LOOK)
    introduced(a, b)
    own = signer(b).seal(KEY, b"body", NOW + 60)
    inner = a._decrypted(KEY, B, own)[1] if record == "the peer's own" else b"made up"
    swapped = PrivateSwarm(B, thief.holding, lambda: NOW).seal(KEY, B, inner)
    assert opened(a, swapped) in ("signature", "garbage")
    with pytest.raises(ProtocolError):
        storable(a)(KEY, B, swapped, NOW)
    a.check(B, FORWARD)
    assert a.learn(revoke(thief)) == []


def test_records_of_those_who_only_look_or_are_no_members_any_more_are_refused() -> None:
    a, looker, old = member("QmA"), member("QmB", may=Permission.LOOK), member("QmB", until=NOW)
    assert opened(a, signer(looker).seal(KEY, b"body", NOW + 60)) == "permission"
    assert opened(a, signer(looker).seal(REVOKED_KEY, b"list", NOW + 60), key=REVOKED_KEY) == b"list"
    assert opened(a, signer(old).seal(KEY, b"body", NOW + 60)) == "expired"
    b = member("QmB")
    a.learn(revoke(b))
    assert opened(a, signer(b).seal(KEY, b"body", NOW + 60)) == "revoked"


def test_a_node_of_the_dht_keeps_records_whose_peer_is_revoked() -> None:
    """It would refuse all others of that key with it, and readers look at each anyway."""
    a, b = member("QmA"), member("QmB")
    a.learn(revoke(b))
    sealed = signer(b).seal(KEY, b"body", NOW + 60)
    assert a.unseal(KEY, B, sealed, NOW, VirtualSigner(A).open)[0] == b"body"


def test_the_dht_s_keys_do_not_tell_the_run() -> None:
    ours, theirs = member("QmA").hidden(KEY), member("QmA", by=founder("other")).hidden(KEY)
    assert ours == member("QmB").hidden(KEY) != theirs
    assert founder().run not in ours
