"""Each fault does what it says to a small swarm of real nodes, and the swarm comes right again.

The audit watches all of it (decentral/sim/audit.py): a test that ends with `settle` has also shown that everybody
knows who is there, and that the replicas are together.
"""

from dataclasses import replace
from functools import partial

import pytest

from decentral.core import config
from decentral.core.ids import PeerId
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.joining.join import JoinPhase
from decentral.sim import faults
from decentral.sim.audit import InvariantAudit
from decentral.sim.fault_injector import FaultInjector
from decentral.sim.geography import SwarmGeography, TypicalLink
from decentral.sim.run import ROSTER_SETTLE_S
from decentral.sim.swarm import SimulatedPeer, SimulatedSwarm, SwarmSettings
from decentral.sim.sweep import SETTINGS
from decentral.sim.virtual_host import Pace

WIRES = TypicalLink(delay_s=0.02)


class FaultyPeers:
    """A swarm with its faults, played as far as a test wants."""

    def __init__(self, spec: str = "", peers: int = 4, algorithm: str = "pull", unquantised: bool = False) -> None:
        run = config.load(None, [*SETTINGS, f"gossip.algorithm={algorithm}"])
        settings = replace(SwarmSettings.of(run, Pace(0.4, 0.05, report_s=2.0), (1.0,), 1024), unquantised=unquantised)
        self.audit = InvariantAudit(run.gossip.max_age_s)
        self.swarm = SimulatedSwarm(settings, 1, SwarmGeography(1, WIRES), self.audit)
        self.injector = FaultInjector(self.swarm)
        self.audit.swarm, self.audit.injector = self.swarm, self.injector
        self.lines: list[tuple[PeerId, Seconds, Log]] = []
        self.swarm.journal = self._note
        for number in range(peers):
            self.swarm.agenda.at(0.3 * number, partial(self.swarm.start, self.swarm.add()))
        self.injector.plan(faults.parse(spec))

    def __getitem__(self, number: int) -> SimulatedPeer:
        return self.swarm.members[number]

    def _note(self, peer: PeerId, t: Seconds, line: Log) -> None:
        self.lines.append((peer, self.swarm.agenda.now, line))

    def play(self, until: Seconds) -> None:
        while self.swarm.agenda.now < until:
            self.swarm.agenda.run(min(until, self.swarm.agenda.now + 1))
            self.audit.check()

    def settle(self) -> None:
        self.play(self.injector.last_at + self.swarm.settings.config.swarm.record_ttl_s + ROSTER_SETTLE_S + 1)
        assert all(member.training for member in self.swarm.living)
        self.audit.finish(settled=True)

    def said(self, event: str, number: int | None = None, since: Seconds = 0, until: Seconds = 1e9) -> list[Log]:
        """Journal lines of a peer, or of all."""
        whose = None if number is None else self[number].peer
        return [
            line for peer, t, line in self.lines if line.event == event and whose in (None, peer) and since <= t < until
        ]

    def steps(self, number: int, since: Seconds, until: Seconds) -> int:
        return len(self.said("step", number, since, until))

    def knows(self, number: int) -> set[int]:
        member = self[number]
        assert member.host is not None
        return {self.swarm.by_peer[peer].number for peer in member.host.node.roster.live}


def own_steps(member: SimulatedPeer) -> int:
    assert member.host is not None
    return member.host.node.progress.step


# Lives


def test_a_crash_with_its_disk_keeps_its_identity_and_goes_on_from_the_checkpoint() -> None:
    played = FaultyPeers("crash 1 at 40; restart 1 at 45")
    played.play(44)
    member = played[1]
    assert not member.alive
    assert member.disk is not None
    saved = member.disk.own_steps
    played.play(60)
    assert (member.lives, len(played.swarm.members)) == (2, 4)
    assert member.training
    assert own_steps(member) >= saved > 0
    played.settle()


def test_a_crash_without_its_disk_is_a_newcomer_who_starts_where_the_swarm_is() -> None:
    played = FaultyPeers("crash 1 at 40; wipe 1 at 45")
    played.play(60)
    assert not played[1].alive
    newcomer = played[4]
    assert newcomer.training
    (joined,) = played.said("joined", 4)
    assert joined.fields["donors"]
    assert newcomer.host is not None
    assert newcomer.host.training.lr_step > 60
    played.settle()


def test_all_down_at_once_go_on_from_their_own_checkpoints() -> None:
    played = FaultyPeers("crash all at 40; restart all at 45")
    played.play(44)
    assert not played.swarm.living
    saved = [member.disk.own_steps for member in played.swarm.members if member.disk is not None]
    played.play(70)
    assert all(own_steps(member) >= steps > 0 for member, steps in zip(played.swarm.members, saved, strict=True))
    played.settle()


def test_who_leaves_says_so() -> None:
    played = FaultyPeers("leave 2 at 40")
    played.play(60)
    assert {line.fields["reason"] for line in played.said("peer_left")} == {"left"}
    assert [played.knows(number) for number in (0, 1, 3)] == [{1, 3}, {0, 3}, {0, 1}]
    played.settle()


def test_a_stopped_process_does_nothing_and_goes_on() -> None:
    played = FaultyPeers("freeze 1 at 40 for 10")
    played.play(80)
    assert played.steps(1, 40.5, 50) == 0
    assert played.steps(0, 40.5, 50) > 3
    assert played.steps(1, 51, 80) > 5
    assert played[1].lives == 1
    played.settle()


def test_after_a_freeze_longer_than_all_deadlines_it_is_back_on_everybody_s_roster() -> None:
    played = FaultyPeers("freeze 1 at 30 for 75")
    played.play(100)
    assert 1 not in played.knows(0)
    played.settle()


def test_a_slow_peer_makes_fewer_steps_and_nobody_else_does() -> None:
    played = FaultyPeers("slow 1 x5 at 40 for 40")
    played.play(80)
    made = [sum(line.fields["tokens"] for line in played.said("step", number, 42, 80)) for number in range(4)]
    assert made[1] < made[0] / 4
    assert min(made[0], made[2], made[3]) > 0.9 * max(made)
    played.settle()


def test_a_hundred_newcomers_at_once_all_start_where_the_swarm_is() -> None:
    played = FaultyPeers("join 100 at 30", unquantised=True)
    played.play(90)
    assert sum(member.training for member in played.swarm.members) == 104
    assert all(line.fields["donors"] for number in range(4, 104) for line in played.said("joined", number))


def test_a_donor_that_dies_in_the_middle_of_a_transfer_stops_no_newcomer() -> None:
    played = FaultyPeers("join 1 at 40")
    played.play(40)
    agenda = played.swarm.agenda
    while not (donors := _donors_of(played[4])):
        assert agenda.now < 60
        agenda.run(agenda.now + 0.005)
    died = played.swarm.by_peer[donors[0]]
    played.swarm.crash(died)
    played.play(agenda.now + 30)
    assert played[4].training
    (joined,) = played.said("joined", 4)
    assert set(joined.fields["donors"]) - {died.peer}
    played.swarm.start(died)
    played.injector.last_at = agenda.now
    played.settle()


def _donors_of(member: SimulatedPeer) -> list[PeerId]:
    """Who is sending it a piece of state."""
    if member.host is None or member.port is None or member.host.node.join.state is not JoinPhase.FETCHING:
        return []
    return [question.target for question in member.port.asked if question.writing is not None]


# Wires


def test_a_partition_makes_two_swarms_and_heals_into_one() -> None:
    played = FaultyPeers("part 0,1 at 40 for 40")
    played.play(79)
    assert [played.knows(number) for number in range(4)] == [{1}, {0}, {3}, {2}]
    assert min(played.steps(number, 45, 79) for number in range(4)) > 10
    played.settle()


def test_over_a_one_way_link_nothing_is_asked_and_others_are() -> None:
    played = FaultyPeers("oneway 0>1 at 40 for 30")
    played.play(69)
    outcomes = [line.fields for line in played.said("exchange", 1, 55, 69)]
    assert not [fields for fields in outcomes if fields["partner"] == played[0].peer and fields["outcome"] == "done"]
    assert [fields for fields in outcomes if fields["partner"] == played[2].peer and fields["outcome"] == "done"]
    played.settle()


def test_a_degraded_link_has_a_part_of_its_rate_and_then_all_of_it() -> None:
    played = FaultyPeers("degrade 0-1 x0.1 at 40 for 10")
    played.play(39)
    geography, ends = played.swarm.geography, (played[0].peer, played[1].peer)
    free = min(geography.up(ends[0]), geography.down(ends[1]))
    played.play(45)
    assert geography.bandwidth(*ends) == pytest.approx(free / 10)
    played.settle()
    assert geography.bandwidth(*ends) >= free


def test_behind_a_nat_everything_takes_the_relay() -> None:
    played = FaultyPeers("nat 3 at 40")
    played.play(39)
    geography, ends = played.swarm.geography, (played[0].peer, played[3].peer)
    direct_s = geography.delay_s(*ends)
    played.play(60)
    assert geography.delay_s(*ends) > 1.9 * direct_s
    assert played.said("exchange", 3, 42, 60)
    played.settle()


@pytest.mark.parametrize("skew_s", [-2.5, 2.5])
def test_a_clock_that_is_wrong_harms_nobody(skew_s: float) -> None:
    played = FaultyPeers(f"skew 2 by {skew_s} at 20")
    played.play(60)
    assert played[2].host is not None
    assert played[0].host is not None
    assert played[2].host.clock() - played[0].host.clock() == pytest.approx(skew_s)
    done = [line for line in played.said("exchange", 0, 30, 60) if line.fields["partner"] == played[2].peer]
    assert any(line.fields["outcome"] == "done" for line in done)
    played.settle()


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        ("corrupt 0.2 at 20 for 40", {"digest", "garbage", "oversize", "version"}),
        ("truncate 0.2 at 20 for 40", {"cut"}),
    ],
)
def test_damaged_messages_are_counted_and_dropped(spec: str, refused: set[str]) -> None:
    played = FaultyPeers(spec)
    played.play(60)
    counted = {reason for member in played.swarm.members if member.port for reason in member.port.refused}
    failed = {line.fields["reason"] for line in played.said("exchange") if line.fields["outcome"] == "failed"}
    assert (counted | failed) & refused
    played.settle()


@pytest.mark.parametrize("spec", ["loss 0.2 at 20 for 40", "duplicate 0.2 at 20 for 40", "reorder 0.2 at 20 for 40"])
def test_lost_doubled_and_reordered_messages_cost_at_most_time(spec: str) -> None:
    played = FaultyPeers(spec)
    played.play(60)
    done = [line for line in played.said("exchange", since=20, until=60) if line.fields["outcome"] == "done"]
    assert len(done) > 50
    played.settle()


def test_records_that_are_seen_late_and_stale_delay_who_knows_whom_and_no_more() -> None:
    played = FaultyPeers("late 2 at 0 for 30")
    played.settle()


# Lies

CAUGHT = {
    "nan": {"nan"},
    "stale": {"replay", "stale"},
    "replayed": {"replay", "stale"},
    "corrupted": {"digest"},
}


@pytest.mark.parametrize("how", CAUGHT)
def test_a_liar_is_caught_and_does_no_harm(how: str) -> None:
    played = FaultyPeers(f"lie 2 {how} at 30 for 30")
    played.play(60)
    failed = [line.fields for line in played.said("exchange", since=30, until=60) if line.fields["outcome"] == "failed"]
    assert {fields["reason"] for fields in failed if fields["partner"] == played[2].peer} & CAUGHT[how]
    played.settle()


def test_a_liar_who_exaggerates_moves_the_others_by_a_bounded_amount() -> None:
    played = FaultyPeers("lie 2 scaled at 30 for 30")
    played.settle()
    assert played.audit.farthest < 20


# The other algorithms


@pytest.mark.parametrize("algorithm", ["symmetric", "push_sum", "allreduce"])
@pytest.mark.parametrize(
    "spec",
    [
        "crash 1 at 30; restart 1 at 40",
        "part 0,1 at 30 for 20",
        "freeze 2 at 30 for 15",
        "crash all at 30; restart all at 40",
        "lie 2 nan at 30 for 15",
    ],
)
def test_the_other_algorithms_come_right_too(algorithm: str, spec: str) -> None:
    FaultyPeers(spec, algorithm=algorithm).settle()


# The same seed


@pytest.mark.parametrize("spec", ["", "crash 1 at 30; restart 1 at 40; loss 0.1 at 20 for 20; join 3 at 25"])
def test_two_stages_play_the_same_piece(spec: str) -> None:
    played: list[list[tuple[PeerId, Seconds, Log]]] = []
    for _ in range(2):
        played = FaultyPeers(spec)
        played.play(50)
        played.append(played.lines)
    assert played[0] == played[1]
