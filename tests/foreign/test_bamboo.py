"""Bamboo's traces as faults and peer-seconds, and the lineage of tokens, on synthetic lines."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.foreign import bamboo
from benchmarks.foreign.lineage import Lineage, union
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.journal.events import AppliedLine, ExchangeLine, JoinedLine, StepLine
from decentral.core.machine import Log
from decentral.sim.faults import Fault
from decentral.sim.network.geography import TypicalLink
from decentral.sim.swarm import SimulatedSwarm

TRACE = "0,add,n1\n0,add,n2\n2000,add,n3\n5000,remove,n1\n"
ANN, BOB, CYN = PeerId("ann"), PeerId("bob"), PeerId("cyn")
FRAGMENTS = (Fragment(0, 0, 1, 10), Fragment(1, 1, 2, 10))


def trained(tokens: int) -> Log:
    return Log(StepLine(step=1, lr_step=1, tokens=tokens, micro_batches=1, loss=None, seconds=1.0, aside={}))


def merged(partner: PeerId, fragment: int, age_s: float) -> Log:
    return Log(
        ExchangeLine(
            fragment=fragment,
            partner=partner,
            outcome="done",
            reason="",
            seconds=0.1,
            sent_bytes=0,
            received_bytes=0,
            age_s=age_s,
        )
    )


def joined(donor: PeerId, seconds: float) -> Log:
    return Log(JoinedLine(peers=1, donors=(donor,), seconds=seconds))


def lineage(*living: PeerId, routed: bool = False) -> Lineage:
    """A lineage of a swarm in which only these peers live at the end."""
    found = Lineage(FRAGMENTS, routed)
    members = [SimpleNamespace(peer=peer) for peer in living]
    found.begin(cast(SimulatedSwarm, SimpleNamespace(living=members)))
    return found


def test_a_trace_becomes_first_peers_joins_and_crashes() -> None:
    assert bamboo.churn(TRACE) == (2, [Fault("join", 2.0, value=1), Fault("crash", 5.0, (0,))])


def test_available_time_goes_from_adding_a_node_to_removing_it_or_to_the_end() -> None:
    assert bamboo.available_s(*bamboo.churn(TRACE), 10) == 5 + 10 + 8
    assert bamboo.available_s(*bamboo.churn(TRACE), 4) == 4 + 4 + 2


@pytest.mark.parametrize("text", ["0,explode,n1\n", "soon,add,n1\n", "0,add\n", "5,remove,n1\n"])
def test_a_trace_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="milliseconds"):
        bamboo.churn(text)


def test_less_of_the_time_is_useful_where_newcomers_get_their_state_slowly() -> None:
    text = "0,add,n1\n0,add,n2\n20000,add,n3\n90000,remove,n2\n120000,remove,n3\n"
    fast, slow = (
        bamboo.played("whole", "short", text, 120, TypicalLink(0.001, rate, rate), 0) for rate in (1.25e9, 4e7)
    )
    assert slow.useful < 0.85 * fast.useful
    assert fast.useful < fast.trained < 1, "what n2 trained after its last snapshot dies with it"


def test_tokens_of_peers_that_live_are_useful() -> None:
    ours = lineage(ANN, BOB)
    ours.line(ANN, 1.0, trained(10))
    ours.line(BOB, 1.0, trained(5))
    assert ours.useful() == 15


def test_tokens_that_nobody_merged_die_with_their_peer() -> None:
    ours = lineage(BOB)
    ours.line(ANN, 1.0, trained(10))
    assert ours.useful() == 0


def test_a_merge_saves_what_was_trained_before_the_snapshot_in_that_fragment() -> None:
    ours = lineage(BOB)
    ours.line(ANN, 1.0, trained(10))
    ours.line(ANN, 3.0, trained(7))
    ours.line(BOB, 4.0, merged(ANN, 0, age_s=2.0))
    assert ours.useful() == 10 / 2


def test_tokens_that_two_peers_hold_count_once() -> None:
    ours = lineage(ANN, BOB)
    ours.line(ANN, 1.0, trained(10))
    for fragment in range(2):
        ours.line(BOB, 2.0, merged(ANN, fragment, age_s=0.5))
    assert ours.useful() == 10


def test_a_newcomer_carries_on_what_its_donor_had_merged() -> None:
    ours = lineage(CYN)
    ours.line(ANN, 1.0, trained(10))
    for fragment in range(2):
        ours.line(BOB, 2.0, merged(ANN, fragment, age_s=0.5))
    ours.line(BOB, 9.0, trained(4))
    ours.line(CYN, 10.0, joined(BOB, seconds=5.0))
    assert ours.useful() == 10


def test_with_parts_an_optimiser_step_counts_in_its_own_layers() -> None:
    ours = lineage(ANN, routed=True)
    ours.line(ANN, 1.0, trained(10))
    ours.line(ANN, 1.0, Log(AppliedLine(of=((1, 2, 6),))))
    assert ours.useful() == 6 / 2


def test_of_each_peer_the_most_tokens_are_held() -> None:
    assert union([{ANN: 3, BOB: 1}, {ANN: 2, CYN: 4}]) == {ANN: 3, BOB: 1, CYN: 4}


def test_a_folder_that_is_no_checkout_ends_with_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bamboo.main([str(tmp_path)]) == 2
    assert "is no checkout of Bamboo" in capsys.readouterr().err
