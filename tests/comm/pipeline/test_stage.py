"""What a peer's stage computes for other peers."""

import pytest

from decentral.comm.pipeline.execution import StageExecution
from decentral.comm.pipeline.stage import StageConfig, StageLoad
from decentral.comm.wire.messages import ExecutionId
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from tests.comm.pipeline.one_form import one_form
from tests.comm.pipeline.test_transcripts import Peers


@pytest.mark.parametrize(("most", "begins"), [(8, [False, True, False]), (0, [False, False, False])])
def test_a_peer_that_computes_for_no_other_refuses_offers_too(most: int, begins: list[bool]) -> None:
    cuts = Fragment(0, 0, 1, 100), Fragment(1, 1, 2, 100)
    stage = StageConfig(RunId("run"), PeerId("S"), 0, 2, cuts, most, 4, 1, lambda layer, sequences: one_form(()))
    assert [stage.begins(layer) for layer in range(3)] == begins


def test_the_forward_passes_that_a_later_step_applies_do_not_make_a_device_seem_slow() -> None:
    """With routes that overlap, a step comes while a second micro-batch is between its passes."""
    cuts = tuple(Fragment(index, index, index + 1, 100) for index in range(4))
    stage = StageConfig(RunId("run"), PeerId("S"), 0, 2, cuts, 8, 4, 1, lambda layer, sequences: one_form(()))
    load = StageLoad(stage, Peers({}))
    forward_s, backward_s = 0.5 / 3, 0.5 * 2 / 3  # of 100 tokens through half of the model, at 100 tokens/s
    executions = [
        StageExecution(
            local_id=number,
            id=ExecutionId(PeerId("o"), number, 0),
            last=2,
            memory_share=1.0,
            started_at=0.0,
            until=9.0,
            drawn=0.0,
            round=0,
        )
        for number in range(2)
    ]
    for execution in executions:
        load.forward_done(execution, 100)
    for execution, forwards in zip(executions, (2, 0), strict=True):
        load.backward_done(execution, 100, forward_counted=True)
        load.measure_speed(forwards * forward_s + backward_s)
        assert load.speed == pytest.approx(100.0)
