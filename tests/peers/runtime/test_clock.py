"""A peer's clock: unix time that never jumps, goes on while the machine is suspended, and is the swarm's."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from decentral.core import jobs
from decentral.peers.runtime import clock
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.runtime.handlers import PeerEvent
from decentral.peers.runtime.node import Node
from tests.peers.runtime.host_swarm import Swarm

HOUR_S = 3600.0


class Machine:
    """A machine whose clocks a test sets."""

    def __init__(self, wall: float = 1_700_000_000.0, steady: float = 50.0) -> None:
        self.wall_s, self.steady_s = wall, steady

    def clock(self) -> SwarmClock:
        return SwarmClock(lambda: self.wall_s, lambda: self.steady_s)

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_wall_clock_that_jumps_changes_no_time(jump_s: float) -> None:
    machine = Machine()
    own = machine.clock()
    began = own()
    machine.wait(10.0)
    machine.wall_s += jump_s
    assert own() == began + 10.0
    assert own.machine_ahead_s() == jump_s


def test_the_time_of_a_suspension_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_MONOTONIC stands still on a laptop that sleeps: the peer would be ten minutes late for ever."""
    known = {time.CLOCK_MONOTONIC: 100.0, getattr(time, "CLOCK_BOOTTIME", -1): 100.0}
    monkeypatch.setattr(time, "clock_gettime", lambda which: known[which])
    own = SwarmClock(lambda: 5000.0)
    began = own()
    known[time.CLOCK_BOOTTIME] += 600.0
    assert own() == began + 600.0


@pytest.mark.parametrize(
    ("ahead_s", "set_by"),
    [
        ([], 0.0),
        ([1.5], 0.0),
        ([-HOUR_S], -HOUR_S),
        ([HOUR_S, HOUR_S + 1], HOUR_S),
        ([float("inf")], 0.0),  # it ended the peer
        ([float("nan"), HOUR_S], HOUR_S),
        ([1e300, HOUR_S, HOUR_S], HOUR_S),
        ([HOUR_S, 0.1], 0.0),  # ours and one other against one
        ([1e9, 0.1, -0.2], 0.0),
        ([HOUR_S, HOUR_S, -1e9], HOUR_S),
    ],
)
def test_a_newcomer_goes_by_the_clock_of_most_peers(ahead_s: list[float], set_by: float) -> None:
    machine = Machine()
    own, before = machine.clock(), machine.clock()
    assert own.agree(ahead_s) == set_by
    assert own() == before() + set_by


def test_a_difference_is_said_in_words() -> None:
    assert clock.difference(HOUR_S) == "60 min ahead of"
    assert clock.difference(-90.4) == "90 s behind"


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_peer_whose_wall_clock_jumps_exchanges_on_and_says_so(
    swarm_of: Any, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    monkeypatch.setattr("decentral.peers.runtime.host.CLOCK_S", 0.01)
    swarm: Swarm = swarm_of("pull")

    async def jumped() -> None:
        await swarm.start("A")
        await swarm.start("B", contacts="A")
        await swarm.until(lambda: swarm.all_have_exchanged(2))
        host = swarm.hosts["B"]
        wall = host.wall
        host.wall = lambda: wall() + jump_s
        await swarm.until(lambda: bool(swarm.journal("B", "clock")))
        done = host.node.gossip.counts.outcomes["done"]
        await swarm.until(lambda: host.node.gossip.counts.outcomes["done"] >= done + 6)
        assert f"60 min {'ahead of' if jump_s > 0 else 'behind'} the swarm's" in " ".join(host.troubles())

    swarm.play(jumped())
    assert swarm.journal("B", "clock")[0]["jumped_s"] == pytest.approx(jump_s, abs=1.0)


def later(clock: Callable[[], float], slept: list[float]) -> Callable[[], float]:
    return lambda: clock() + slept[0]


def test_peers_that_were_suspended_for_ten_minutes_find_each_other_and_exchange(swarm_of: Any) -> None:
    """All records have expired by then, and every deadline is over."""
    swarm: Swarm = swarm_of("pull")
    slept = [0.0]

    async def suspended() -> None:
        await swarm.start("A")
        await swarm.start("B", contacts="A")
        for host in swarm.hosts.values():
            host.now = later(host.now, slept)
        await swarm.until(lambda: swarm.all_have_exchanged(2))
        slept[0] = 600.0
        before = {name: host.node.gossip.counts.outcomes["done"] for name, host in swarm.hosts.items()}
        await swarm.until(
            lambda: all(
                host.node.gossip.counts.outcomes["done"] > before[name] + 3 for name, host in swarm.hosts.items()
            )
        )

    swarm.play(suspended())
    assert all(len(host.node.roster.live) == 1 for host in swarm.hosts.values())


def test_a_window_that_was_closed_before_the_machine_was_suspended_is_as_old_as_that(
    swarm_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was published as new, and partners merged what was ten minutes old (seed 550262 of the sweep)."""
    swarm, ages = swarm_of("pull"), list[float]()
    host, handle = swarm.add("A"), Node.handle

    class Suspended:
        """It closes a window; the loop hears of it ten minutes later."""

        def submit(self, job: jobs.Job) -> None:
            """It does nothing more."""

        def training_s(self) -> float:
            return 0.0

        def run(self, report: Callable[[jobs.Outcome], None]) -> None:
            report(jobs.WindowClosed(0, 1, 5, (), b""))
            raise RuntimeError("it was all that it had to do")

    def heard(node: Node, event: PeerEvent, now: float) -> list[Any]:
        ages.extend([event.ago_s] if isinstance(event, jobs.WindowClosed) else [])
        return handle(node, event, now)

    async def suspended() -> None:
        went_on, now = threading.get_ident(), host.now
        host.now = lambda: now() + (600.0 if threading.get_ident() == went_on else 0.0)
        await host.run()

    host.compute = Suspended()
    monkeypatch.setattr(Node, "handle", heard)
    swarm.play(suspended())
    assert ages == pytest.approx([600.0], abs=5.0)
