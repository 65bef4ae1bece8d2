"""Newcomers whose only donor has a thin uplink, in virtual time: real state machines, and states of synthetic bytes."""

import pytest

from decentral.core import config
from decentral.core.ids import PeerId
from decentral.core.journal.events import JoinedLine
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.sim.host import Pace
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import Scenario, StopRun, run
from decentral.sim.swarm import SimulatedSwarm, SwarmSettings

MBIT = 1e6 / 8
PEERS = 4


class Joins:
    """A watch of a run that records how many virtual seconds each peer needed from its start to its join."""

    def __init__(self) -> None:
        self.seconds: dict[PeerId, Seconds] = {}

    def begin(self, swarm: SimulatedSwarm) -> None: ...

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        if isinstance(log.event, JoinedLine):
            self.seconds[peer] = log.event.seconds

    def end(self) -> None: ...


@pytest.mark.parametrize(("up_mbps", "within_s"), [(0.6, 150.0), (1.2, 75.0)])
def test_three_newcomers_of_one_donor_with_a_thin_uplink_all_join(up_mbps: float, within_s: Seconds) -> None:
    """All pieces were requested at once, shared the uplink, and came after their deadline: nobody ever joined."""
    settings = SwarmSettings.of(config.load(None, ["gossip.code=auto"]), Pace(0.4, 0.05, report_s=10.0), (1.0,), 512)
    link, joins = TypicalLink(0.075, up_mbps * MBIT, 4 * up_mbps * MBIT, 0.0), Joins()

    def on_progress(_at: Seconds) -> None:
        if len(joins.seconds) == PEERS:
            raise StopRun

    run(Scenario(settings, PEERS, within_s, 0, link=link, audited=False), on_progress, watches=[joins])
    assert len(joins.seconds) == PEERS
