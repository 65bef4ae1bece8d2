"""What a peer's stage computes for other peers."""

import pytest

from decentral.comm.pipeline.stage import StageConfig
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from tests.comm.pipeline.one_form import one_form


@pytest.mark.parametrize(("most", "begins"), [(8, [False, True, False]), (0, [False, False, False])])
def test_a_peer_that_computes_for_no_other_refuses_offers_too(most: int, begins: list[bool]) -> None:
    cuts = Fragment(0, 0, 1, 100), Fragment(1, 1, 2, 100)
    stage = StageConfig(RunId("run"), PeerId("S"), 0, 2, cuts, most, 4, 1, lambda layer, sequences: one_form(()))
    assert [stage.begins(layer) for layer in range(3)] == begins
