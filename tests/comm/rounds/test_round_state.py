"""A round goes through its phases in one order, and says so when it should not."""

from typing import cast

import pytest

from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.rounds.round_state import LEGAL_MOVES, IllegalRoundMove, Round, RoundPhase
from decentral.comm.rounds.search import RoundView
from decentral.comm.wire.messages import RoundMember
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from tests.comm.pipeline.one_form import one_form

CUTS = tuple(Fragment(index, index, index + 1, 100) for index in range(2))
STAGE = StageConfig(
    RunId("run"), PeerId("M"), 0, 2, CUTS, 8, 8, 2, lambda layer, sequences: one_form(()), synchronous=True
)


NOBODY = cast(RoundView, None)  # nothing is asked


def round_in(phase: RoundPhase) -> Round:
    return Round(STAGE, 7, (RoundMember("M", 0, 2),), True, NOBODY, phase=phase)


@pytest.mark.parametrize("phase", RoundPhase)
def test_only_the_moves_of_the_table_are_made(phase: RoundPhase) -> None:
    for target in RoundPhase:
        round = round_in(phase)
        if target in LEGAL_MOVES[phase]:
            round.enter(target)
            assert round.phase is target
        else:
            with pytest.raises(IllegalRoundMove, match=f"round 7 cannot go from {phase.name} to {target.name}"):
                round.enter(target)


def test_every_phase_is_reached_from_the_first_and_leads_to_the_last() -> None:
    reached = [RoundPhase.REPORTS]
    for phase in reached:
        reached += [target for target in LEGAL_MOVES[phase] if target not in reached]
    assert set(reached) == set(RoundPhase)
    assert [phase for phase, targets in LEGAL_MOVES.items() if not targets] == [RoundPhase.OVER]


def test_a_round_whose_members_hold_a_part_of_the_model_is_not_covered() -> None:
    assert round_in(RoundPhase.REPORTS).covered
    assert not Round(STAGE, 7, (RoundMember("M", 0, 1),), True, NOBODY).covered
