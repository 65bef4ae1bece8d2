"""Audits of routes: who gives back something else than two others is found out, and honest peers are left alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from decentral.comm.pipeline.audits import AUDIT_SHARE, OPENING_AUDITS, UNUSUAL_AFTER, Usual, twin
from decentral.comm.pipeline.next_peer import MOST_RIGHT, NO_ROUTES_S
from decentral.comm.wire.messages import ForwardRequest
from decentral.comm.wire.transport import Ask
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.jobs import UNLIKE
from decentral.engine.micro_batch_names import MicroBatchNames
from tests.comm.pipeline.route_world import Device, Peer, World, cuts_of
from tests.journal_lines import audited

CUTS = cuts_of([100, 100, 100])
SAME = jobs.Likeness(1.0, 1.0)
NORMS = (1.0, 1.0, 10.0, 0.0)  # of a gradient, by its first byte; the first is honest


@dataclass
class AuditedDevice(Device):
    """Names its micro-batches as a real device does. A liar's gradients are like nobody's, and like each other.

    What comes from a lying hop behind is passed on, as the chain rule does.
    """

    lies: bool = False
    lie: int = 1  # the gradient that it sends, an index of NORMS
    answered: int = 0
    chance: Random = field(default_factory=lambda: Random(7))
    names: MicroBatchNames = field(default_factory=lambda: MicroBatchNames.known("a"))

    def do(self, job: Any) -> Any:
        outcome = super().do(job)
        match job:
            case jobs.Draw():
                return replace(outcome, number=self.names.pair(outcome.number) + self.chance.randrange(2))
            case jobs.Backward():
                outcome = replace(outcome, blob=job.blob, given_norm=NORMS[job.blob[0]])
        if isinstance(outcome, jobs.BackwardDone):
            self.answered += 1
            if self.lies:
                return replace(outcome, blob=bytes([self.lie]) * 16)
        return outcome


@dataclass
class Comparing(AuditedDevice):
    def do(self, job: Any) -> Any:
        if isinstance(job, jobs.Compare):
            *others, newest = (blob for _, blob in job.gradients)
            return jobs.Compared(job.local_id, tuple(SAME if newest == one else UNLIKE for one in others))
        return super().do(job)


def swarm(
    ends: str, liars: str = "", middle: str = "", audited: bool = True, per_step: int = 1, overlap: bool = True
) -> World:
    """A and B begin, each of `middle` goes on, each of `ends` ends."""
    world = World(CUTS)
    cut = 1 if middle else 2
    spans = {"A": (0, cut), "B": (0, cut), **dict.fromkeys(middle, (1, 2)), **dict.fromkeys(ends, (2, 3))}
    for name, span in spans.items():
        device = Comparing(end=3, lies=name in liars)
        chance = Random(name) if audited else None
        world.add(name, *span, device=device, per_step=per_step, chance=chance, overlap=overlap)
    return world


def lines(world: World, event: str = "audit") -> Iterator[tuple[str, dict[str, Any]]]:
    for peer in world.peers.values():
        yield from ((peer.name, line) for line in peer.lines if line["event"] == event)


def counted(peer: Peer) -> int:
    return sum(len(line["of"]) for line in peer.lines if line["event"] == "counted")


def played(world: World, seconds: float = 15.0) -> World:
    world.start()
    world.run(seconds)
    return world


def wrong(world: World) -> set[str]:
    return {line["wrong"] for _, line in lines(world) if "wrong" in line}


def test_a_hop_that_lies_is_found_out_and_gets_no_more_routes() -> None:
    world = played(swarm("XYZ", liars="X"), 5.0)
    assert wrong(world) == {"X"}
    early = counted(world.peers[PeerId("X")])
    world.run(15.0)
    assert counted(world.peers[PeerId("X")]) == early < 30
    assert counted(world.peers[PeerId("Y")]) > 80


def test_a_liar_that_comes_again_under_other_names_is_found_each_time() -> None:
    """What its first names cost is not taken from the audits of the later ones."""
    world = played(swarm("YZ"), 1.0)
    for turn in range(6):
        liar = world.add(f"X{turn}", 2, 3, device=Comparing(end=3, lies=True))
        liar.routes.start()
        world.run(10.0)
        assert counted(liar) < 15
        world.kill(liar.name)
        world.run(2.0)
    assert wrong(world) == {f"X{turn}" for turn in range(6)}


def test_without_audits_the_same_hop_has_its_part_of_all_routes() -> None:
    world = played(swarm("XYZ", liars="X", audited=False))
    assert counted(world.peers[PeerId("X")]) > 40


def test_a_liar_that_is_asked_in_audits_harms_only_itself() -> None:
    world = played(swarm("XYZW", liars="X"))
    assert wrong(world) == {"X"}


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_blamed_where_all_are_honest(seed: int) -> None:
    world = swarm("XYZ")
    for peer in world.peers.values():
        peer.routes.audits.chance = Random(seed)
    played(world)
    verdicts = [line["verdict"] for _, line in lines(world)]
    assert set(verdicts) == {"agreed"}


@pytest.mark.parametrize("per_step", [1, 16])
def test_nothing_counts_twice_and_audits_cost_what_they_may(per_step: int) -> None:
    world = played(swarm("XYZ", per_step=per_step), 60.0)
    found = audited(world.lines(), len(CUTS))
    assert found.sound
    assert found.everywhere > 300
    dropped = [line for of_peer in world.lines() for line in of_peer if line["event"] == "uncounted"]
    audits = sum(len(line["peers"]) - 1 for _, line in lines(world))
    spent = audits + sum(len(line["of"]) - line["void"] for line in dropped)  # those of audits themselves count once
    once = sum(OPENING_AUDITS * world.peers[PeerId(name)].routes.audits.times for name in "AB")
    own, last = 2 / 3, 1 / 3  # of the model: what A and B compute, and what an audit repeats
    assert 0 < last * spent <= AUDIT_SHARE * own * found.everywhere + last * once


@pytest.mark.parametrize("middle", ["", "M"])
def test_audits_cost_one_share_of_all_passes_however_many_peers_a_route_has(middle: str) -> None:
    world = swarm("X", middle=middle, overlap=False)
    prices = [
        world.peers[PeerId(name)].routes.audits.price(first, first + 1 if middle else 2)
        for first, name in enumerate("A" + middle)
    ]
    assert [round(cost / (2 * 2 / 3), 3) for _, cost in prices] == ([1.0, 0.5] if middle else [0.5])
    assert sum(allowed for allowed, _ in prices) == pytest.approx(AUDIT_SHARE * 2 / 3)  # the end audits nobody


def test_trusted_peers_are_not_audited_on_credit_and_a_newcomer_is() -> None:
    """What was spent on credit is paid back before a trusted peer is audited again."""
    world = played(swarm("XYZ", overlap=False), 60.0)
    audits = [world.peers[PeerId(name)].routes.audits for name in "AB"]
    for one in audits:
        _, cost = one.price(0, 2)
        assert one.answers > 100
        assert 0 < one.owed <= OPENING_AUDITS / 2 * cost
    newcomer = world.add("W", 2, 3, device=Comparing(end=3, lies=True))
    newcomer.routes.start()
    world.run(10.0)
    assert wrong(world) == {"W"}
    assert counted(newcomer) < 15


@pytest.mark.parametrize("lie", [2, 3])
def test_a_trusted_peer_whose_gradients_become_unusual_is_found_within_twenty_answers(lie: int) -> None:
    world = swarm("XYZ")
    world.start()
    world.run(20.0)
    liar, trusts = world.peers[PeerId("X")].device, [world.peers[PeerId(name)].routes.forwarding.trust for name in "AB"]
    assert isinstance(liar, AuditedDevice)
    for trust in trusts:
        trust.by_peer[PeerId("X")].right = MOST_RIGHT
    before, liar.lies, liar.lie = liar.answered, True, lie
    while any(trust.weight(PeerId("X"), world.now) for trust in trusts):
        world.run(0.1)
        assert liar.answered <= before + 20
    assert wrong(world) == {"X"}


def test_an_answer_is_unusual_if_it_is_far_from_many_before_it() -> None:
    usual = Usual()
    sizes = [1.0 + 0.4 * math.sin(number) for number in range(200)]
    assert not any(usual.differs(size, 2.0) for size in sizes)
    assert usual.differs(3.0, 2.0)
    assert usual.differs(0.3, 2.0)
    assert all(usual.differs(size, 2.0) for size in (0.0, math.inf, math.nan))
    assert not usual.differs(1.0, 2.0), "what is unusual changes little"
    assert not any(usual.differs(0.99**number, 2.0) for number in range(500)), "as a loss falls"


def test_before_many_answers_none_is_unusual() -> None:
    usual = Usual()
    assert not any(usual.differs(10.0**number, 2.0) for number in range(UNUSUAL_AFTER))


def test_with_exact_gradients_an_audit_drops_its_own_executions_only() -> None:
    world = played(swarm("XYZ", per_step=8, overlap=False), 60.0)
    found = audited(world.lines(), len(CUTS))
    assert found.sound
    assert found.everywhere > 300
    audits = sum(len(line["peers"]) - 1 for _, line in lines(world))
    assert 6 <= audits == found.dropped


def test_with_two_holders_nobody_can_tell_who_lies() -> None:
    world = played(swarm("XY", liars="X"))
    assert {line["verdict"] for _, line in lines(world)} == {"undecided"}
    assert wrong(world) == set()


def test_with_one_holder_there_is_nobody_to_ask() -> None:
    assert list(lines(played(swarm("X", liars="X")))) == []


def test_a_liar_at_the_end_is_found_by_those_before_it_and_they_keep_their_routes() -> None:
    world = played(swarm("XYZ", liars="X", middle="MNO"), 25.0)
    finders = {name for name, line in lines(world) if line.get("wrong") == "X"}
    assert finders <= set("MNO")
    assert len(finders) >= 2
    for name in "AB":
        trust = world.peers[PeerId(name)].routes.forwarding.trust
        assert all(trust.weight(PeerId(middle), world.now) > 0 for middle in "MNO")


def test_a_peer_that_was_found_out_is_tried_again_after_a_while() -> None:
    world = played(swarm("XYZ", liars="X"), 10.0)
    device = world.peers[PeerId("X")].device
    assert isinstance(device, AuditedDevice)
    device.lies = False
    before = counted(world.peers[PeerId("X")])
    for name in "AB":
        reputation = world.peers[PeerId(name)].routes.forwarding.trust.by_peer[PeerId("X")]
        reputation.suspended_until, reputation.at = world.now, world.now - NO_ROUTES_S
    world.run(15.0)
    assert counted(world.peers[PeerId("X")]) > before + 10


def test_an_audit_looks_like_any_other_request() -> None:
    """But for its number, which only those tell from an origin peer's own who have seen both."""
    world = swarm("XYZ")
    requests: dict[str, list[ForwardRequest]] = {}

    def seen(now: float, ask: Ask) -> bool:
        if isinstance(ask.envelope.message, ForwardRequest):
            requests.setdefault(ask.to, []).append(ask.envelope.message)
        return False

    world.loses = seen
    played(world, 40.0)
    sent = [one for own in requests.values() for one in own]
    numbers = {(one.origin, one.number) for one in sent}
    audits = [one for one in sent if (one.origin, twin(one.number)) in numbers]
    assert len(audits) >= 12  # pairs of a micro-batch and its audit
    for to, own in requests.items():
        pairs = {(one.origin, twin(one.number)) for one in own} & {(one.origin, one.number) for one in own}
        assert pairs == set(), f"{to} has seen both of a pair"
    originals = {(one.origin, one.number): one for one in sent}
    for one in audits:
        other = originals[one.origin, twin(one.number)]
        assert (one.first, one.sequences, one.layout, one.round) == (
            other.first,
            other.sequences,
            other.layout,
            other.round,
        )
        assert one.patience_s == pytest.approx(other.patience_s)
        assert one.hold_s == pytest.approx(other.hold_s)


def test_an_origin_peer_s_numbers_do_not_show_which_of_a_pair_they_are() -> None:
    device = Comparing(end=3)
    drawn = [device.do(jobs.Draw(local_id, 2)).number for local_id in range(200)]
    assert 60 < sum(number % 2 for number in drawn) < 140
    assert not {twin(number) for number in drawn} & set(drawn)


def test_what_cannot_be_an_answer_blames_nobody() -> None:
    """Neither a refusal nor a peer that is gone is an opinion."""
    world = swarm("XYZ")
    world.start()
    world.run(1.0)
    world.kill("Y")
    world.run(20.0)
    assert wrong(world) == set()
    assert all(not peer.routes.audits.open for peer in world.peers.values())


def test_who_never_answers_does_not_keep_audits_from_others() -> None:
    """Y takes requests and says nothing; the audits go on with the others, and find X."""
    world = swarm("XYZW", liars="X")
    world.loses = lambda now, ask: ask.to == "Y" and isinstance(ask.envelope.message, ForwardRequest)
    played(world, 25.0)
    assert wrong(world) == {"X"}
