"""What routes follow from the roster: layers that nobody holds, speeds, and peers that are gone."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from decentral.comm.pipeline.execution import ExecutionState, NextHop, OwnExecution, Paused, Sent
from decentral.comm.pipeline.forwarding import SUCCESSOR_RETRY_S
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import CommitDecision, ExecutionId
from decentral.comm.wire.meter import Meter
from decentral.comm.wire.transport import Ask
from decentral.core.config import Config
from decentral.core.fragments import Fragment, Section
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import HeldLine, UnheldLine
from decentral.core.machine import Log
from decentral.core.memory_needs import MemoryNeeds
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.route_planner import UNHELD_S, RoutePlanner
from decentral.peers.runtime.setup import NodeSetup, PresentSetup
from decentral.scheduler.placement.move import MemoryBudget
from tests.comm.pipeline.one_form import one_form

RUN = RunId("gpt-3fa2c1")
CUTS = (Fragment(0, 0, 1, 100), Fragment(1, 1, 3, 200))
NEEDS = MemoryNeeds(CUTS, (10, 10), (0, 0), (3, 5))
LAYOUT = (Section("phi", "int8", 6, 6),)
PROFILE = Profile("cpu", 1 << 30, 1e9, 1e4)
OTHER = PeerRecord(RUN, 0.0, (), PROFILE, 1, 3, 5, 5, 100, phase=PeerPhase.TRAINING)
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
    node = Node(setup)
    return RoutePlanner(PresentSetup(setup), node.roster, Meter(), node.selection, Random(0))


def test_layers_without_a_holder_are_said_after_a_while_and_once(planner: RoutePlanner) -> None:
    assert planner.refresh(0.0) == planner.refresh(UNHELD_S - 1) == []
    assert planner.unheld == ""
    assert planner.refresh(UNHELD_S) == [Log(UnheldLine(reason=SAID, first=1, last=3))]
    assert planner.refresh(UNHELD_S + 1) == []
    assert planner.unheld == SAID


def test_that_all_layers_are_held_again_is_said_once(planner: RoutePlanner) -> None:
    planner.refresh(0.0)
    planner.refresh(UNHELD_S)
    planner.roster.holders.put(PeerId("QmOther"), OTHER)
    assert planner.refresh(UNHELD_S + 1) == [Log(HeldLine())]
    assert planner.unheld == ""
    assert planner.refresh(UNHELD_S + 2) == []


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


def test_routes_get_no_more_than_our_links_carry(planner: RoutePlanner) -> None:
    planner.roster.holders.put(PeerId("QmOther"), OTHER)
    planner.routes.load.speed = 1e4
    planner.solve(always=True)
    free = planner.weights.tokens_per_s
    planner.meter.saw(PeerId("QmOther"), 1.0, 0.0, 1_000_000, 0)
    planner.solve(always=True)
    carried = planner.roster.holders.links.crossings_per_s(CUTS, (0, 1), 1_000_000)
    assert planner.weights.tokens_per_s == pytest.approx(carried, rel=0.01)
    assert carried < 0.9 * free


AT_OTHER = Sent(PeerId("QmOther"), 0.0, 99.0, 99.0)


def away(hop: NextHop) -> OwnExecution:
    """A micro-batch of ours that another peer has."""
    id = ExecutionId(PeerId("QmMe"), 7, 0)
    execution = OwnExecution(
        local_id=1, id=id, last=1, memory_share=1.0, started_at=0.0, until=99.0, drawn=0.0, round=0
    )
    execution.state, execution.next_hop = ExecutionState.AWAY, hop
    return execution


def test_what_a_peer_has_under_way_goes_to_others_when_the_roster_has_lost_it(planner: RoutePlanner) -> None:
    hop = NextHop(8, layout=(), payload=b"", gradients=(), place=AT_OTHER)
    execution = away(hop)
    planner.routes.table.add(execution)
    assert planner.look_for_lost(0.0) == []
    assert hop.to == "QmOther", "the roster has not changed"
    planner.roster.changes += 1
    (told,) = planner.look_for_lost(2.0)
    assert isinstance(told, Ask)
    assert told.envelope.message == CommitDecision(RUN, (), (execution.next_id,))
    assert hop.to is None
    assert hop.place == Paused(2.0 + SUCCESSOR_RETRY_S)


def test_peers_with_the_whole_model_are_in_the_flow_where_gradients_overlap(planner: RoutePlanner) -> None:
    planner.routes.load.set_stage(replace(planner.routes.stage, overlap=True))
    planner.routes.load.speed = 100.0
    planner.roster.holders.put(PeerId("QmWhole"), replace(OTHER, first=0, last=3))
    planner.refresh(0.0)
    weights = planner.weights
    assert weights.tokens_per_s == pytest.approx(100.0 + 300.0, rel=0.01), "what we can begin, and carry for us"
    assert set(weights.nexts[1]) == {(0, 3)}


def test_where_gradients_are_exact_they_have_turns_by_measured_times(planner: RoutePlanner) -> None:
    planner.routes.load.speed = 100.0
    planner.roster.holders.put(PeerId("QmWhole"), replace(OTHER, first=0, last=3))
    planner.roster.holders.put(PeerId("QmOther"), replace(OTHER, first=1, last=3))
    planner.refresh(0.0)
    weights, (alone, other) = planner.weights, ((0, 3, 100.0), (1, 3, 100.0))
    assert weights.rate(1, alone) == weights.rate(1, other) > 0


def test_a_roster_that_reads_some_keys_only_says_nothing_of_who_is_gone(planner: RoutePlanner) -> None:
    planner.roster.size.level = 3
    hop = NextHop(8, layout=(), payload=b"", gradients=(), place=AT_OTHER)
    planner.routes.table.add(away(hop))
    planner.roster.changes += 1
    assert planner.look_for_lost(2.0) == []
    assert hop.to == "QmOther"
