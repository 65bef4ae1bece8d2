"""Layers that only one peer holds are copied to another peer's disk, by one peer, once in each checkpoint interval."""

from random import Random

import pytest

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import StateChunk, StateRequest
from decentral.comm.wire.transport import Answered, Ask, Effect
from decentral.core.fragments import Fragment, Section
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import DropCopy, RetainCopy, RetainedChanged
from decentral.core.journal.events import CopyLine
from decentral.core.machine import Log
from decentral.core.memory_needs import MemoryNeeds
from decentral.scheduler.placement.cold_copies import COPY_SHARE, DECLINED_S, MOST_EVERY_S, ColdCopies
from decentral.scheduler.placement.evaluate import TrainingPeer
from decentral.scheduler.placement.move import FETCH_STALLED_S, MemoryBudget

RUN = RunId("gpt-3fa2c1")
CUTS = tuple(Fragment(index, index, index + 1, 25) for index in range(4))
BUDGET = MemoryBudget(MemoryNeeds(CUTS, (10,) * 4, (0,) * 4, (0,) * 4), 20, ((Section("phi", "fp32", 25, 100),),) * 4)
EVERY_S = 30.0
STEP_S = 2.0
PARTS = {"A": range(0, 2), "B": range(2, 4), "C": range(2, 4), "D": range(3, 4)}  # only A holds fragments 0 and 1


class Swarm:
    """Peers with spans and disks; each step of two seconds, a peer that is up reviews its copies and trains a step."""

    def __init__(self, spans: dict[str, range], rate: float = 0.0) -> None:
        self.now, self.rate, self.lr_step = 100.0, rate, 1
        self.spans = {PeerId(name): span for name, span in spans.items()}
        self.disks: dict[PeerId, dict[int, int]] = {name: {} for name in self.spans}
        self.copies = {name: ColdCopies(RUN, name, BUDGET, EVERY_S, Random(0)) for name in self.spans}
        self.full: set[PeerId] = set()
        self.silent: set[PeerId] = set()
        self.lines: list[CopyLine] = []
        self.requests: list[tuple[float, PeerId, int]] = []  # (time, who asked, fragment)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP_S)):
            self.now, self.lr_step = self.now + STEP_S, self.lr_step + 1
            members = {
                name: TrainingPeer(span, 20, 1.0, self.rate, lr_step=max(0, self.lr_step))
                for name, span in self.spans.items()
            }
            stored = {name: tuple(self.disks[name].items()) for name in self.spans}
            for name in self.spans:
                self.carry(name, self.copies[name].review(members, stored, self.now))

    def carry(self, name: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask(tag, to, Envelope(StateRequest(fragment=fragment))):
                    self.requests.append((self.now, name, fragment))
                    assert fragment in self.spans[to]
                    if to not in self.silent:
                        chunk = Envelope(StateChunk(RUN, fragment, 0, 100, self.lr_step, BUDGET.layouts[0]), bytes(100))
                        answer = Answered(tag, to, chunk, 0.1, 0.1, 10, 10)
                        self.carry(name, self.copies[name].handle(answer, self.now))
                case RetainCopy(fragment, step=step):
                    reason = "OSError: no space" if name in self.full else ""
                    self.disks[name] |= {} if reason else {fragment: step}
                    self.kept(name, fragment, reason)
                case DropCopy(fragment, step):
                    assert self.disks[name].pop(fragment) == step
                    self.kept(name, fragment)
                case Log(CopyLine() as line):
                    self.lines.append(line)

    def kept(self, name: PeerId, fragment: int, reason: str = "") -> None:
        kept = RetainedChanged(fragment, tuple(self.disks[name].items()), reason)
        self.carry(name, self.copies[name].handle(kept, self.now))

    def copiers(self, fragment: int) -> list[PeerId]:
        return [name for name in self.spans if fragment in self.disks[name]]

    def lose(self, name: str) -> None:
        del self.spans[PeerId(name)]


def test_a_fragment_with_one_holder_is_copied_by_one_peer_in_each_interval() -> None:
    swarm = Swarm(PARTS)
    swarm.pass_time(6.0)
    (copier,) = swarm.copiers(0)
    assert swarm.copiers(2) == swarm.copiers(3) == []
    swarm.pass_time(10 * EVERY_S)
    assert swarm.copiers(0) == [copier]
    assert 10 <= sum(fragment == 0 for _, _, fragment in swarm.requests) <= 12
    assert {line.outcome for line in swarm.lines} == {"done"}


def test_a_copy_is_never_older_than_an_interval() -> None:
    swarm = Swarm(PARTS)
    swarm.pass_time(6.0)
    for _ in range(200):
        swarm.pass_time(STEP_S)
        (copier,) = swarm.copiers(0)
        assert STEP_S * (swarm.lr_step - swarm.disks[copier][0]) <= EVERY_S


@pytest.mark.parametrize("spans", [{"A": range(0, 4), "B": range(0, 4)}, {"A": range(0, 2), "B": range(0, 2)}])
def test_fragments_with_two_holders_cost_nothing(spans: dict[str, range]) -> None:
    swarm = Swarm(spans)
    swarm.pass_time(5 * EVERY_S)
    assert swarm.requests == []


def test_fragments_are_shared_among_the_peers() -> None:
    """16 swarms differ in one peer's id: of the 32 fragments, no peer copies all."""
    copied = []
    for number in range(16):
        swarm = Swarm({"A": range(0, 2), f"B{number}": range(2, 4), "C": range(2, 4)})
        swarm.pass_time(10.0)
        copied += [name for index in (0, 1) for name in swarm.copiers(index)]
    assert 8 <= copied.count(PeerId("C")) <= 24


def test_another_peer_takes_over_when_the_copier_goes() -> None:
    swarm = Swarm(PARTS)
    swarm.pass_time(6.0)
    (copier,) = swarm.copiers(0)
    swarm.lose(copier)
    swarm.pass_time(4.0)
    assert len(swarm.copiers(0)) == 1


def test_a_copy_stays_where_it_is_when_a_peer_comes() -> None:
    swarm = Swarm({"A": range(0, 2), "B": range(2, 4)})
    swarm.pass_time(6.0)
    for number in range(8):
        name = PeerId(f"E{number}")
        swarm.spans[name], swarm.disks[name] = range(2, 4), {}
        swarm.copies[name] = ColdCopies(RUN, name, BUDGET, EVERY_S, Random(0))
    swarm.pass_time(3 * EVERY_S)
    assert swarm.copiers(0) == swarm.copiers(1) == ["B"]


def test_a_peer_whose_disk_is_full_declines_and_the_next_copies_one_interval_later() -> None:
    swarm = Swarm(PARTS)
    swarm.pass_time(6.0)
    (first,) = swarm.copiers(0)
    other = Swarm(PARTS)
    other.full = {first}
    other.pass_time(EVERY_S + 10.0)
    assert other.copiers(0) not in ([], [first])
    assert {line.reason for line in other.lines if line.outcome == "failed"} == {"OSError: no space"}
    other.pass_time(DECLINED_S - EVERY_S)
    declined = [at for at, name, fragment in other.requests if name == first and fragment == 0]
    assert len(declined) <= 2


def test_a_copy_is_deleted_one_interval_after_another_peer_holds_the_fragment() -> None:
    swarm = Swarm(PARTS)
    swarm.pass_time(6.0)
    swarm.spans |= {PeerId("D"): range(0, 2)}
    swarm.pass_time(EVERY_S - 4.0)
    assert len(swarm.copiers(0)) == 1
    swarm.pass_time(10.0)
    assert swarm.copiers(0) == swarm.copiers(1) == []


def test_a_copy_of_a_lost_fragment_stays() -> None:
    swarm = Swarm(PARTS)
    swarm.pass_time(6.0)
    swarm.lose("A")
    swarm.pass_time(10 * EVERY_S)
    assert len(swarm.copiers(0)) == len(swarm.copiers(1)) == 1


@pytest.mark.parametrize("giver", "BCD")
def test_a_state_that_a_peer_has_given_up_is_renewed_there(giver: str) -> None:
    swarm = Swarm(PARTS)
    swarm.disks[PeerId(giver)] = {0: 1}
    swarm.pass_time(2 * EVERY_S)
    assert swarm.copiers(0) == [giver]
    assert STEP_S * (swarm.lr_step - swarm.disks[PeerId(giver)][0]) <= EVERY_S


def test_a_holder_that_has_not_trained_is_not_copied() -> None:
    swarm = Swarm(PARTS)
    swarm.lr_step = -20
    swarm.pass_time(20.0)
    assert swarm.requests == []


def test_a_slow_uplink_is_copied_from_less_often() -> None:
    """Two fragments of 100 bytes: a tenth of 20 bytes/s takes 100 s for them."""
    swarm = Swarm(PARTS, rate=200 / (COPY_SHARE * 100.0))
    swarm.pass_time(1000.0)
    assert sum(fragment == 0 for _, _, fragment in swarm.requests) == pytest.approx(10, abs=1)


def test_a_rate_that_no_link_has_is_not_believed() -> None:
    swarm = Swarm(PARTS, rate=5e-324)
    swarm.pass_time(2 * MOST_EVERY_S)
    assert sum(fragment == 0 for _, _, fragment in swarm.requests) in (2, 3)


def test_a_silent_holder_fails_the_copy_and_is_asked_again() -> None:
    swarm = Swarm(PARTS)
    swarm.silent = {PeerId("A")}
    swarm.pass_time(FETCH_STALLED_S + 4.0)
    assert {(line.outcome, line.reason) for line in swarm.lines} == {("failed", "donors")}
    swarm.silent = set()
    swarm.pass_time(20.0)
    assert len(swarm.copiers(0)) == 1


def test_a_second_holder_ends_a_copy_under_way() -> None:
    swarm = Swarm(PARTS)
    swarm.silent = {PeerId("A")}
    swarm.pass_time(4.0)
    assert swarm.requests
    swarm.spans |= {PeerId("D"): range(0, 2)}
    swarm.pass_time(FETCH_STALLED_S + 10.0)
    assert swarm.lines == []
    assert not any(copies.fetch.incoming for copies in swarm.copies.values())
