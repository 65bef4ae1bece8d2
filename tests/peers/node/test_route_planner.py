"""Layers that no peer holds: after a while the peers that wait for them say so, and what would help."""

from pathlib import Path
from random import Random

import pytest

from decentral.comm.routes.stage import StageConfig
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.meter import Meter
from decentral.core import jobs
from decentral.core.config import Config
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Section
from decentral.core.machine import log
from decentral.core.memory_needs import MemoryNeeds
from decentral.peers.membership.records import PeerRecord, Profile
from decentral.peers.node.node import Node
from decentral.peers.node.route_planner import UNHELD_S, RoutePlanner
from decentral.peers.node.setup import NodeSetup
from decentral.peers.placement.span_move import MemoryBudget
from tests.comm.routes.one_form import one_form

RUN = RunId("gpt-3fa2c1")
CUTS = (jobs.Fragment(0, 0, 1, 100), jobs.Fragment(1, 1, 3, 200))
NEEDS = MemoryNeeds(CUTS, (10, 10), (0, 0), (3, 5))
LAYOUT = (Section("phi", "int8", 6, 6),)
PROFILE = Profile("cpu", 1 << 30, 1e9, 1e4)
OTHER = PeerRecord(RUN, 0.0, (), PROFILE, 1, 3, 5, 5, 100, phase="training")
SAID = (
    "no peer that trains holds layers 1 to 2, so no micro-batch gets through the model: "
    f"start a peer with --memory {NEEDS.span_bytes(1, 2)} or more, or begin a run with a smaller train.micro_batch"
)


@pytest.fixture
def planner(tmp_path: Path) -> RoutePlanner:
    """Of a peer with the first of two fragments, which knows nobody."""
    own = Identity.load_or_create(tmp_path / "own")
    stage = StageConfig(RUN, own.peer, 0, 1, CUTS, 9, 4, 1, lambda layer, sequences: one_form(LAYOUT))
    budget = MemoryBudget(NEEDS, 30, (LAYOUT, LAYOUT))
    named = Config(), RUN, own, CUTS[:1], [LAYOUT], 3, PROFILE, ("/ip4/127.0.0.1/tcp/1",)
    setup = NodeSetup(*named, routes=stage, memory_budget=budget)
    return RoutePlanner(lambda: setup, Node(setup).roster, Meter(), Random(0))


def test_layers_without_a_holder_are_said_after_a_while_and_once(planner: RoutePlanner) -> None:
    assert planner.refresh(0.0) == planner.refresh(UNHELD_S - 1) == []
    assert planner.unheld == ""
    assert planner.refresh(UNHELD_S) == [log("unheld", reason=SAID)]
    assert planner.refresh(UNHELD_S + 1) == []
    assert planner.unheld == SAID


def test_nothing_is_said_any_more_once_a_peer_that_trains_holds_them(planner: RoutePlanner) -> None:
    planner.refresh(0.0)
    planner.refresh(UNHELD_S)
    planner.roster.holders.put(PeerId("QmOther"), OTHER)
    assert planner.refresh(UNHELD_S + 1) == []
    assert planner.unheld == ""


def test_a_holder_that_is_away_for_a_short_time_is_no_trouble(planner: RoutePlanner) -> None:
    holders = planner.roster.holders
    for second in range(0, 60, 2):
        (holders.drop if second % 8 else lambda peer: holders.put(peer, OTHER))(PeerId("QmOther"))
        assert planner.refresh(float(second)) == []


@pytest.mark.parametrize(("tokens_per_s", "thin"), [(100.0, False), (1e6, True)])
def test_a_link_is_thin_where_a_busy_device_would_fill_it(
    planner: RoutePlanner, tokens_per_s: float, thin: bool
) -> None:
    assert not planner.is_thin(), "nothing was measured"
    planner.routes.load.speed = tokens_per_s
    assert not planner.is_thin(), "the link was not"
    planner.meter.saw(PeerId("QmOther"), 1.0, 0.01, 1_000_000, 100)
    assert planner.is_thin() == thin
