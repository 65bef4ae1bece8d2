"""A member hears in the DHT whom the founder has revoked, passes it on, and stops when its own invitation is over."""

from dataclasses import dataclass
from random import Random

from decentral.comm.wire.invitations import FOR_EVER, Permission
from decentral.comm.wire.private_swarm import MemberSigner, PrivateSwarm, revoked_key
from decentral.comm.wire.transport import Announce, Found, Lookup
from decentral.core.ids import PeerId
from decentral.core.journal.events import ErrorLine, RevokedLine
from decentral.core.machine import Log, Woke
from decentral.core.reasons import Reason
from decentral.peers.membership import revocation_watch
from decentral.peers.membership.revocation_watch import (
    COPIES,
    COPY_S,
    LOOK_S,
    WARN_S,
    Exclude,
    MembershipOver,
    RevocationWatch,
    WatchEffect,
)
from decentral.sim.virtual_signer import VirtualSigner
from tests.comm.wire.invited import HOUR_S, NOW, founder, member

KEY = revoked_key(founder().run)


@dataclass
class Others:
    """A roster with so many other peers."""

    live: range

    def exclude(self, peer: PeerId, now: float) -> list[Log]:
        return []


class Watched:
    """A member A with its watch, at any time."""

    def __init__(self, until: float = FOR_EVER, others: int = 0) -> None:
        self.now = NOW
        self.private = member("QmA", until=until, now=lambda: self.now)
        own = signer(self.private)
        self.watch = RevocationWatch(own, self.private, Random(0), Others(range(others)))

    def wake(self, now: float) -> list[WatchEffect]:
        self.now = now
        return self.watch.handle(Woke(), now)

    def find(self, *values: tuple[PrivateSwarm, bytes], expires: float = NOW + COPY_S) -> list[WatchEffect]:
        found: dict[str, bytes] = {one.own: signer(one).seal(KEY, packed, expires) for one, packed in values}
        return self.watch.handle(Found(KEY, found), self.now)


def signer(private: PrivateSwarm) -> MemberSigner:
    return MemberSigner(VirtualSigner(private.own), private)


def revoking(*peers: PrivateSwarm, number: int = 1) -> bytes:
    return founder().revoke(number, frozenset(one.holding.invitation.id for one in peers)).packed


def herald() -> PrivateSwarm:
    """The founder's visit, by which a list comes into the DHT."""
    return member("QmHerald", may=Permission.LOOK)


def known(watched: Watched, name: str = "QmB") -> PrivateSwarm:
    other = member(name)
    watched.private.verify(other.own, other.proof)
    return other


def announced(effects: list[WatchEffect]) -> list[Announce]:
    return [one for one in effects if isinstance(one, Announce)]


def over(effects: list[WatchEffect]) -> list[str]:
    return [one.reason for one in effects if isinstance(one, MembershipOver)]


def test_it_looks_often_enough_for_a_revocation_to_reach_all_within_a_minute() -> None:
    watched = Watched()
    assert watched.wake(NOW) == [Lookup(KEY)]
    assert watched.wake(NOW + LOOK_S - 1) == []
    assert watched.wake(NOW + LOOK_S) == [Lookup(KEY)]
    assert LOOK_S <= 30.0


def test_a_revoked_peer_is_excluded_and_the_list_is_kept() -> None:
    watched = Watched()
    other = known(watched)
    exclude, line, *_ = watched.find((herald(), revoking(other)))
    assert exclude == Exclude((other.own,), revoking(other))
    assert isinstance(line, Log)
    assert isinstance(line.event, RevokedLine)
    assert line.event.peers == (other.own,)


def test_a_list_is_taken_once_and_an_older_one_never() -> None:
    watched = Watched()
    other = known(watched)
    watched.find((herald(), revoking(other, number=2)))
    for packed in (revoking(other, number=2), revoking(number=1)):
        assert not [one for one in watched.find((herald(), packed)) if isinstance(one, Exclude)]
    assert not watched.private.admits(other.own)


def test_the_highest_number_counts_whoever_announces_it() -> None:
    watched = Watched()
    b, c = known(watched), known(watched, "QmC")
    old, new = revoking(number=1), revoking(b, c, number=2)
    watched.find((member("QmD"), old), (herald(), new), (member("QmE"), old))
    assert (watched.private.admits(b.own), watched.private.admits(c.own)) == (False, False)


def test_a_list_that_nobody_passes_on_is_announced_again_by_one_who_has_it() -> None:
    watched = Watched()
    (ours,) = announced(watched.find((herald(), revoking(known(watched)))))
    assert ours.subkey == "QmA"
    assert signer(member("QmC")).open(KEY, watched.private.own, ours.value, NOW) == (
        watched.private.revocations.packed,
        NOW + COPY_S,
    )


def test_where_enough_copies_last_none_is_added_and_old_copies_do_not_count() -> None:
    watched = Watched()
    packed = revoking(known(watched))
    copies = [(member(f"Qm{number}"), packed) for number in range(COPIES)]
    assert announced(watched.find(*copies)) == []
    assert announced(watched.find(*copies, expires=NOW + 1)) != []


def test_in_a_large_swarm_few_pass_it_on() -> None:
    tries = 0
    watched = Watched(others=200)
    packed = revoking(known(watched))
    for _ in range(400):
        tries += len(announced(watched.find((herald(), packed))))
    assert 0 < tries < 20


def test_before_anything_was_revoked_nothing_is_announced() -> None:
    assert Watched().find() == []


def test_what_is_no_list_is_ignored() -> None:
    watched = Watched()
    stranger = member("QmX", by=founder("other"))
    assert watched.find((herald(), b"garbage"), (stranger, revoking())) == []


def test_a_revoked_peer_stops_with_one_word_of_why_and_says_it_once() -> None:
    watched = Watched()
    effects = watched.find((herald(), revoking(watched.private)))
    assert over(effects) == ["no member: the swarm's founder has revoked this peer's invitation"]
    assert announced(effects) == []
    assert watched.wake(NOW + 60) == []
    assert watched.watch.wake_at is None


def test_a_peer_that_heard_of_it_from_another_stops_at_its_next_look() -> None:
    watched = Watched()
    watched.private.learn(revoking(watched.private))
    assert len(over(watched.wake(NOW + LOOK_S))) == 1


def test_an_expiring_invitation_is_told_an_hour_before_and_ends_the_peer() -> None:
    end = NOW + 3 * HOUR_S
    watched = Watched(until=end)
    watched.wake(NOW)
    assert not [one for one in watched.wake(end - WARN_S - 1) if isinstance(one, Log)]
    assert watched.watch.wake_at == end - WARN_S  # sooner than its next look
    (line,) = [one for one in watched.wake(end - WARN_S) if isinstance(one, Log)]
    assert isinstance(line.event, ErrorLine)
    assert "expires in 60 minutes" in line.event.reason
    assert not [one for one in watched.wake(end - 60) if isinstance(one, Log)]
    assert watched.private.until == end
    assert over(watched.wake(end)) == [f"no member: {revocation_watch.ENDINGS[Reason.EXPIRED]}"]
