"""A simulation's page: it has the run's own figures, and watching changes nothing of the run."""

from typing import cast

from decentral.core import config
from decentral.core.config import Config
from decentral.core.journal.lines import Recorded
from decentral.sim import faults
from decentral.sim.host import Pace
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings
from decentral.view.page.child import DashboardProcess
from decentral.view.page.simulated import SimulatedPage
from decentral.view.page.source_lines import PageEvent
from decentral.view.page.swarm_view import SwarmView


class Page:
    """Shows what it is told at once."""

    def __init__(self) -> None:
        self.view = SwarmView()

    def tell(self, peer: str, t: float, event: PageEvent) -> None:
        self.view.take(peer, Recorded(t, event))


def scenario() -> Scenario:
    settings = SwarmSettings.of(Config(gossip=config.GossipConfig(window_s=5.0)), Pace(0.5, 0.0), [1.0, 2.0], 1024)
    return Scenario(settings, 4, 20.0, seed=1, faults=tuple(faults.parse("crash 2 at 12")))


def test_the_page_of_a_simulation_has_its_figures_and_changes_nothing() -> None:
    page = Page()
    report = run(scenario(), watches=[SimulatedPage(cast(DashboardProcess, page))])
    assert report.audit.digest == run(scenario()).audit.digest
    page.view.tick(page.view.now)
    totals = page.view.totals
    assert totals.tokens == report.throughput.tokens
    assert (totals.live, totals.gone) == (3, 1)
    assert dict(zip(("done", "solo", "failed"), totals.exchanges, strict=True)) == {
        name: report.gossip.exchanges.get(name, 0) for name in ("done", "solo", "failed")
    }
    views = sorted(page.view.peers.values(), key=lambda view: view.peer)
    assert [view.device.throttle for view in views] == [1.0, 2.0, 1.0, 2.0]
    assert (views[2].state, views[2].why) == ("ended", "crashed, or stopped")
    assert page.view.facts["run"] == "simulated-000000"
