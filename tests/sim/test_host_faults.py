"""Faults of machines in virtual time: full disks and clocks that jump, and what happens without the defences."""

from collections.abc import Sequence

import pytest

from decentral.comm.wire.transport import Event
from decentral.core import config, jobs
from decentral.core.units import Seconds
from decentral.peers.runtime.progress import ProgressEffect, TrainingProgress
from decentral.sim import faults, simulated_peer, swarm, sweep
from decentral.sim.host import Pace
from decentral.sim.invariants.evidence import Violation
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

FULL_DISK = "full-disk 1 at 20 for 25; full-disk 2 at 20 for 30; crash 2 at 45; restart 2 at 48"
HOUR_AHEAD = "clock 1 by 3600 at 20; crash 1 at 25; restart 1 at 30"
HOUR_BEHIND = "clock 0 by -3600 at 20; crash 0 at 25; restart 0 at 30"
ALL_DOWN = "clock 0 by 3600 at 10; crash all at 20; restart all at 25"


def scenario(text: str, peers: int = 4) -> Scenario:
    run_config = config.load(None, [*sweep.SETTINGS, "gossip.algorithm=pull"])
    settings = SwarmSettings.of(run_config, Pace(0.4, 0.05, report_s=5.0), (1.0, 1.5), 1024, sweep.QUICK)
    return Scenario(settings, peers, 115.0, 1, tuple(faults.parse(text)))


@pytest.mark.parametrize("text", [FULL_DISK, HOUR_AHEAD, HOUR_BEHIND, ALL_DOWN])
def test_a_swarm_outlives_full_disks_and_clocks_that_jump(text: str) -> None:
    report = run(scenario(text))
    assert None not in report.recovery_s.values()
    assert report.replicas.roster_error == 0


def violated(text: str) -> str:
    with pytest.raises(Violation) as caught:
        run(scenario(text))
    return caught.value.rule


def test_peers_that_keep_their_own_clocks_never_find_each_other_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_clock(ahead_s: Sequence[Seconds]) -> Seconds:
        return 0.0

    for module in (simulated_peer, swarm):
        monkeypatch.setattr(module, "agreed_s", own_clock)
    assert violated(HOUR_AHEAD) in ("roster", "holds state", "together")


def test_a_peer_that_never_tries_to_save_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = TrainingProgress.handle

    def gives_up(own: TrainingProgress, event: Event, now: Seconds) -> list[ProgressEffect]:
        return [] if isinstance(event, jobs.SaveFailed) else handle(own, event, now)

    monkeypatch.setattr(TrainingProgress, "handle", gives_up)
    assert violated(FULL_DISK) == "saved"
