"""Each fault does what it says to a small swarm of real nodes, and the swarm recovers.

The audit checks all of it (decentral/sim/invariants/audit.py): a test that ends with `settle` has also shown that every
peer knows who is there, and that the replicas are together.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Snapshot
from decentral.core import config
from decentral.core.ids import PeerId
from decentral.core.journal.events import (
    CheckpointLine,
    ExchangeLine,
    JoinedLine,
    JournalEvent,
    LostLine,
    PeerLeftLine,
    StepLine,
)
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.joining.join import JoinPhase
from decentral.peers.membership.records import RENEWALS
from decentral.peers.runtime.clock import CLOCKS_AGREE_S
from decentral.sim import faults
from decentral.sim.fault_injector import FaultInjector
from decentral.sim.host import Pace
from decentral.sim.invariants.audit import InvariantAudit
from decentral.sim.network.geography import SwarmGeography, TypicalLink
from decentral.sim.run import ROSTER_SETTLE_S
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SimulatedSwarm, SwarmSettings
from decentral.sim.sweep import QUICK, SETTINGS

EventT = TypeVar("EventT", bound=JournalEvent)

LINK = TypicalLink(delay_s=0.02)


class FaultySwarm:
    """A swarm with its faults, which a test plays for as long as it wants."""

    def __init__(self, spec: str = "", peers: int = 4, algorithm: str = "pull", unquantised: bool = False) -> None:
        run = config.load(None, [*SETTINGS, f"gossip.algorithm={algorithm}"])
        settings = replace(
            SwarmSettings.of(run, Pace(0.4, 0.05, report_s=2.0), (1.0,), 1024, QUICK), unquantised=unquantised
        )
        self.swarm = SimulatedSwarm(settings, 1, SwarmGeography(1, LINK))
        self.injector = FaultInjector(self.swarm)
        self.audit = InvariantAudit(self.swarm, self.injector)
        self.swarm.observe(self.audit)
        self.lines: list[tuple[PeerId, Seconds, Log]] = []
        self.swarm.listen(self._note)
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
        self.play(self.injector.last_at + RENEWALS * self.swarm.settings.times.renew_s + ROSTER_SETTLE_S + 1)
        assert all(member.training for member in self.swarm.living)
        self.audit.finish(settled=True)

    def said(
        self, kind: type[EventT], number: int | None = None, since: Seconds = 0, until: Seconds = 1e9
    ) -> list[EventT]:
        """Journal lines of a peer, or of all."""
        whose = None if number is None else self[number].peer
        lines = [line.event for peer, t, line in self.lines if whose in (None, peer) and since <= t < until]
        return [line for line in lines if isinstance(line, kind)]

    def steps(self, number: int, since: Seconds, until: Seconds) -> int:
        return len(self.said(StepLine, number, since, until))

    def roster_of(self, number: int) -> set[int]:
        member = self[number]
        assert member.host is not None
        return {self.swarm.by_peer[peer].number for peer in member.host.node.roster.live}


def own_steps(member: SimulatedPeer) -> int:
    assert member.host is not None
    return member.host.node.progress.step


# Lives


def test_a_crash_with_its_disk_keeps_its_identity_and_goes_on_from_the_checkpoint() -> None:
    faulty = FaultySwarm("crash 1 at 40; restart 1 at 45")
    faulty.play(44)
    member = faulty[1]
    assert not member.alive
    assert member.disk.checkpoint is not None
    saved = member.disk.checkpoint.counters.own_steps
    faulty.play(60)
    assert (member.lives, len(faulty.swarm.members)) == (2, 4)
    assert member.training
    assert own_steps(member) >= saved > 0
    faulty.settle()


def test_a_crash_without_its_disk_is_a_newcomer_who_starts_where_the_swarm_is() -> None:
    faulty = FaultySwarm("crash 1 at 40; wipe 1 at 45")
    faulty.play(60)
    assert not faulty[1].alive
    newcomer = faulty[4]
    assert newcomer.training
    (joined,) = faulty.said(JoinedLine, 4)
    assert joined.donors
    assert newcomer.host is not None
    assert newcomer.host.training.lr_step > 60
    faulty.settle()


def test_peers_that_are_all_down_at_once_go_on_from_their_own_checkpoints() -> None:
    faulty = FaultySwarm("crash all at 40; restart all at 45")
    faulty.play(44)
    assert not faulty.swarm.living
    saved = [
        member.disk.checkpoint.counters.own_steps
        for member in faulty.swarm.members
        if member.disk.checkpoint is not None
    ]
    faulty.play(70)
    assert all(own_steps(member) >= steps > 0 for member, steps in zip(faulty.swarm.members, saved, strict=True))
    faulty.settle()


def test_a_peer_that_leaves_says_so() -> None:
    faulty = FaultySwarm("leave 2 at 40")
    faulty.play(60)
    reasons = Counter(str(line.reason) for line in faulty.said(PeerLeftLine))
    assert reasons["left"] >= 1  # a peer that asks it twice before it looks into the directory says "silent"
    assert reasons.total() == 3
    assert [faulty.roster_of(number) for number in (0, 1, 3)] == [{1, 3}, {0, 3}, {0, 1}]
    faulty.settle()


def test_a_stopped_process_does_nothing_until_it_goes_on() -> None:
    faulty = FaultySwarm("freeze 1 at 40 for 10")
    faulty.play(80)
    assert faulty.steps(1, 40.5, 50) == 0
    assert faulty.steps(0, 40.5, 50) > 3
    assert faulty.steps(1, 51, 80) > 5
    assert faulty[1].lives == 1
    faulty.settle()


def test_a_peer_that_is_stopped_twice_still_hears_all_that_came_meanwhile() -> None:
    """What was lost was the end of a job, and the peer's own bookkeeping broke (seed 1019 of the sweep)."""
    faulty = FaultySwarm("freeze 1 at 40 for 10; freeze 1 at 45 for 10")
    faulty.play(44.9)
    host = faulty[1].life
    assert host is not None
    waiting = host._frozen
    assert waiting
    faulty.play(49.9)
    assert host._frozen is waiting
    faulty.play(51)
    assert host._frozen is None
    faulty.settle()


def test_after_a_freeze_longer_than_all_deadlines_it_is_back_on_everybody_s_roster() -> None:
    faulty = FaultySwarm("freeze 1 at 30 for 75")
    faulty.play(100)
    assert 1 not in faulty.roster_of(0)
    faulty.settle()


def test_a_slow_peer_makes_fewer_steps_and_nobody_else_does() -> None:
    faulty = FaultySwarm("slow 1 x5 at 40 for 40")
    faulty.play(80)
    made = [sum(line.tokens for line in faulty.said(StepLine, number, 42, 80)) for number in range(4)]
    assert made[1] < made[0] / 4
    assert min(made[0], made[2], made[3]) > 0.9 * max(made)
    faulty.settle()


@pytest.mark.night
def test_a_hundred_newcomers_at_once_all_start_where_the_swarm_is() -> None:
    faulty = FaultySwarm("join 100 at 30", unquantised=True)
    faulty.play(110)
    assert sum(member.training for member in faulty.swarm.members) == 104
    assert all(line.donors for number in range(4, 104) for line in faulty.said(JoinedLine, number))


def test_a_donor_that_dies_in_the_middle_of_a_transfer_stops_no_newcomer() -> None:
    faulty = FaultySwarm("join 1 at 40")
    faulty.play(40)
    agenda = faulty.swarm.agenda
    while not (donors := _donors_of(faulty[4])):
        assert agenda.now < 60
        agenda.run(agenda.now + 0.005)
    died = faulty.swarm.by_peer[donors[0]]
    faulty.swarm.crash(died)
    faulty.play(agenda.now + 30)
    assert faulty[4].training
    (joined,) = faulty.said(JoinedLine, 4)
    assert set(joined.donors) - {died.peer}
    faulty.swarm.start(died)
    faulty.injector.last_at = agenda.now
    faulty.settle()


def _donors_of(member: SimulatedPeer) -> list[PeerId]:
    """The peers that are sending it a piece of state."""
    if member.host is None or member.host.node.join.phase is not JoinPhase.FETCHING:
        return []
    return [question.target for question in member.host.port.asked if question.writing is not None]


# The network


def test_a_partition_makes_two_swarms_and_heals_into_one() -> None:
    faulty = FaultySwarm("part 0,1 at 40 for 40")
    faulty.play(79)
    assert [faulty.roster_of(number) for number in range(4)] == [{1}, {0}, {3}, {2}]
    assert min(faulty.steps(number, 45, 79) for number in range(4)) > 10
    faulty.settle()


def test_over_a_one_way_link_nothing_is_asked_and_others_are() -> None:
    faulty = FaultySwarm("oneway 0>1 at 40 for 30")
    faulty.play(69)
    done = [line.partner for line in faulty.said(ExchangeLine, 1, 55, 69) if line.outcome == "done"]
    assert faulty[0].peer not in done
    assert faulty[2].peer in done
    faulty.settle()


def test_a_degraded_link_has_a_part_of_its_rate_and_then_all_of_it() -> None:
    faulty = FaultySwarm("degrade 0-1 x0.1 at 40 for 10")
    faulty.play(39)
    geography, ends = faulty.swarm.geography, (faulty[0].peer, faulty[1].peer)
    free = min(geography.up(ends[0]), geography.down(ends[1]))
    faulty.play(45)
    assert geography.bandwidth(*ends) == pytest.approx(free / 10)
    faulty.settle()
    assert geography.bandwidth(*ends) >= free


def test_behind_a_nat_everything_takes_the_relay() -> None:
    faulty = FaultySwarm("nat 3 at 40")
    faulty.play(39)
    geography, ends = faulty.swarm.geography, (faulty[0].peer, faulty[3].peer)
    direct_s = geography.delay_s(*ends)
    faulty.play(60)
    assert geography.delay_s(*ends) > 1.9 * direct_s
    assert faulty.said(ExchangeLine, 3, 42, 60)
    faulty.settle()


@pytest.mark.parametrize("skew_s", [-2.5, 2.5])
def test_a_clock_that_is_wrong_harms_nobody(skew_s: float) -> None:
    faulty = FaultySwarm(f"skew 2 by {skew_s} at 20")
    faulty.play(60)
    assert faulty[2].host is not None
    assert faulty[0].host is not None
    assert faulty[2].host.clock() - faulty[0].host.clock() == pytest.approx(skew_s)
    done = [line for line in faulty.said(ExchangeLine, 0, 30, 60) if line.partner == faulty[2].peer]
    assert any(line.outcome == "done" for line in done)
    faulty.settle()


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        ("corrupt 0.2 at 20 for 40", {"digest", "garbage", "oversize", "version"}),
        ("truncate 0.2 at 20 for 40", {"cut"}),
    ],
)
def test_damaged_messages_are_counted_and_dropped(spec: str, refused: set[str]) -> None:
    faulty = FaultySwarm(spec)
    faulty.play(60)
    counted = {reason for member in faulty.swarm.members if member.host for reason in member.host.port.refused}
    failed = {line.reason for line in faulty.said(ExchangeLine) if line.outcome == "failed"}
    assert (counted | failed) & refused
    faulty.settle()


@pytest.mark.parametrize("spec", ["loss 0.2 at 20 for 40", "duplicate 0.2 at 20 for 40", "reorder 0.2 at 20 for 40"])
def test_lost_doubled_and_reordered_messages_cost_at_most_time(spec: str) -> None:
    faulty = FaultySwarm(spec)
    faulty.play(60)
    done = [line for line in faulty.said(ExchangeLine, since=20, until=60) if line.outcome == "done"]
    assert len(done) > 50
    faulty.settle()


def test_late_and_stale_records_only_delay_the_rosters() -> None:
    faulty = FaultySwarm("late 2 at 0 for 30")
    faulty.settle()


@pytest.mark.parametrize("key", faults.ECLIPSED)
def test_hostile_nodes_that_own_a_key_of_the_dht_change_no_roster(key: str) -> None:
    faulty = FaultySwarm(f"eclipse {key} at 10 for 150; join 1 at 40", peers=10)
    for now in range(45, 160, 5):
        faulty.play(now)
        rosters = [set(member.host.node.roster.live) for member in faulty.swarm.members if member.host]
        late = 1 if now < 70 else 0  # the newcomer may be known to some only
        assert min(map(len, rosters)) >= 10 - late, now
    faulty.settle()
    assert all(member.training for member in faulty.swarm.members)


# Byzantine answers

CAUGHT = {
    "nan": {"nan"},
    "stale": {"replay", "stale"},
    "replayed": {"replay", "stale"},
    "corrupted": {"digest"},
}
BOUNDED = "scaled"  # no partner refuses this lie; the merge bounds what it does


@pytest.mark.parametrize("how", CAUGHT)
def test_a_byzantine_peer_is_caught_and_does_no_harm(how: str) -> None:
    faulty = FaultySwarm(f"lie 2 {how} at 30 for 30")
    faulty.play(60)
    failed = [line for line in faulty.said(ExchangeLine, since=30, until=60) if line.outcome == "failed"]
    assert {line.reason for line in failed if line.partner == faulty[2].peer} & CAUGHT[how]
    faulty.settle()


def test_each_lie_in_the_list_is_known_and_another_is_an_error() -> None:
    faulty, told = FaultySwarm("lie 1 corrupted at 5 for 30", peers=2), list[tuple[PeerId, Envelope]]()

    def keep(member: SimulatedPeer, asker: PeerId, envelope: Envelope) -> Envelope:
        told.append((asker, envelope))
        return envelope

    faulty.swarm.falsify(keep)
    faulty.play(15.0)
    asker, honest = next(one for one in told if isinstance(one[1].message, Snapshot))
    assert {*faults.LIES} == {*CAUGHT, BOUNDED}
    for how in faults.ALL_LIES:
        faulty[1].lie(how)
        faulty.injector.byzantine_answer(faulty[1], asker, honest)
    faulty[1].lie("forgotten")
    with pytest.raises(AssertionError, match="no code tells the lie 'forgotten'"):
        faulty.injector.byzantine_answer(faulty[1], asker, honest)


def test_a_byzantine_peer_that_exaggerates_moves_the_others_by_a_bounded_amount() -> None:
    faulty = FaultySwarm(f"lie 2 {BOUNDED} at 30 for 30")
    faulty.settle()
    assert faulty.audit.convergence.farthest < 20


# The other algorithms


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
def test_allreduce_recovers_too(spec: str) -> None:
    FaultySwarm(spec, algorithm="allreduce").settle()


# The same seed


@pytest.mark.parametrize("spec", ["", "crash 1 at 30; restart 1 at 40; loss 0.1 at 20 for 20; join 3 at 25"])
def test_two_runs_of_the_same_faults_write_the_same_journals(spec: str) -> None:
    runs = [FaultySwarm(spec) for _ in range(2)]
    for faulty in runs:
        faulty.play(50)
    assert runs[0].lines == runs[1].lines


def test_a_full_disk_costs_journal_lines_and_checkpoints_and_nothing_else() -> None:
    swarm = FaultySwarm("full-disk 1 at 20 for 15")
    swarm.play(34.9)
    assert swarm.said(StepLine, 1, since=20.0) == []
    assert swarm[1].training
    taken = [line for line in swarm.said(ExchangeLine, 0, since=26.0) if line.partner == swarm[1].peer]
    assert "done" in {line.outcome for line in taken}
    swarm.settle()
    (lost,) = swarm.said(LostLine)
    assert lost.lines > 10
    assert swarm.said(CheckpointLine, 1, since=35.0)


def test_a_clock_that_jumps_under_a_peer_changes_nothing_and_its_next_life_goes_by_the_swarms() -> None:
    swarm = FaultySwarm("clock 1 by 3600 at 20; crash 1 at 40; restart 1 at 45")
    swarm.play(39.0)
    assert swarm[1].clock_s == 0.0
    assert {line.outcome for line in swarm.said(ExchangeLine, 1, since=25.0)} >= {"done"}
    swarm.settle()
    assert abs(swarm[1].clock_s) <= CLOCKS_AGREE_S


def test_all_peers_go_by_the_clock_of_the_first_one_that_comes_back_whatever_it_is() -> None:
    swarm = FaultySwarm("clock 0 by -3600 at 20; crash all at 30; restart all at 35")
    swarm.settle()
    assert {round(member.clock_s) for member in swarm.swarm.members} == {-3600}
