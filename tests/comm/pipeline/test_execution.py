"""The table of states of a stage execution: which moves are legal, and what an illegal one tells."""

import ast
from pathlib import Path

import pytest

from decentral.comm.pipeline import execution as module
from decentral.comm.pipeline.execution import (
    EVENTS_KEPT,
    TRANSITIONS,
    ExecutionEvent,
    ExecutionState,
    InvalidTransition,
    OwnExecution,
    StageExecution,
)
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import ExecutionId, ForwardRequest, Refused
from decentral.comm.wire.transport import Answered, Ask, Asked
from decentral.core import jobs
from decentral.core.ids import PeerId
from tests.comm.pipeline.route_world import RUN, World, cuts_of, layout

FORWARD, AWAY, BACKWARD, IN_DOUBT, GONE, ENDED = ExecutionState


def execution(state: ExecutionState = FORWARD) -> OwnExecution:
    id = ExecutionId("A", 7, 0)
    one = OwnExecution(local_id=3, id=id, last=2, memory_share=1.0, started_at=1.0, until=9.0, drawn=1.0, round=0)
    one.state = state
    return one


@pytest.mark.parametrize(
    ("events", "states"),
    [
        ("SENT_ON GRADIENT_CAME COMPUTED DECIDED", (AWAY, BACKWARD, IN_DOUBT, ENDED)),
        ("SENT_ON SENT_ON GRADIENT_CAME SENT_ON", (AWAY, AWAY, BACKWARD, AWAY)),
        ("SENT_ON GRADIENT_CAME COMPLETED", (AWAY, BACKWARD, ENDED)),
        ("COMPUTED DECIDED", (IN_DOUBT, ENDED)),
        ("GIVEN_UP_AT_WORK THREAD_DONE", (GONE, ENDED)),
        ("SENT_ON GRADIENT_CAME GIVEN_UP_AT_WORK THREAD_DONE", (AWAY, BACKWARD, GONE, ENDED)),
    ],
)
def test_an_execution_goes_through_its_states_in_order(events: str, states: tuple[ExecutionState, ...]) -> None:
    one = execution()
    for event, state in zip(events.split(), states, strict=True):
        one.move(ExecutionEvent[event], "because")
        assert one.state is state


@pytest.mark.parametrize("before", ExecutionState)
@pytest.mark.parametrize("event", ExecutionEvent)
def test_what_the_table_does_not_have_raises_and_changes_nothing(before: ExecutionState, event: ExecutionEvent) -> None:
    one = execution(before)
    if before in TRANSITIONS[event]:
        one.move(event, "because")
        return
    with pytest.raises(InvalidTransition, match=f"{event.name} .* not allowed in state {before.name}"):
        one.move(event, "because")
    assert one.state is before


def test_an_execution_ends_from_every_state_and_never_comes_back() -> None:
    ends = {before for moves in TRANSITIONS.values() for before, after in moves.items() if after is ENDED}
    assert ends == {FORWARD, AWAY, BACKWARD, IN_DOUBT, GONE}
    assert not any(ENDED in moves for moves in TRANSITIONS.values())


def test_an_illegal_move_tells_the_last_events() -> None:
    one = execution()
    one.move(ExecutionEvent.SENT_ON, "forward pass done")
    one.events.append(("sent to", "C"))
    with pytest.raises(InvalidTransition) as raised:
        one.move(ExecutionEvent.COMPUTED, "backward pass done")
    assert str(raised.value) == (
        "COMPUTED (backward pass done) is not allowed in state AWAY: A/7@0 (local id 3, in AWAY): "
        "forward pass done: AWAY; sent to C"
    )


def test_only_the_last_events_are_kept() -> None:
    one = execution(AWAY)
    for number in range(3 * EVENTS_KEPT):
        one.move(ExecutionEvent.SENT_ON, f"try {number}.")
    assert len(one.events) == EVENTS_KEPT
    assert f"try {3 * EVENTS_KEPT - 1}." in one.story()
    assert "try 0." not in one.story()


def test_a_backward_pass_out_of_turn_stops_the_router_with_the_micro_batchs_story() -> None:
    world = World(cuts_of([100] * 4))
    middle = world.add("M", 1, 3).routes
    for name in ("C", "D"):
        world.add(name, 3, 4)
    world.start()
    request = ForwardRequest(RUN, "A", 7, 1, 1, 5.0, 20.0, layout(1, 1))
    middle.handle(Asked(1, PeerId("A"), Envelope(request, bytes(20))), 1.0)
    effects = middle.handle(jobs.ForwardDone(1, 0, 1, 8, layout(1, 1), bytes(20)), 1.1)
    (ask,) = (effect for effect in effects if isinstance(effect, Ask))
    middle.handle(Answered(ask.tag, ask.to, Envelope(Refused("busy")), 0.1, 0.1, 0, 0), 1.2)
    story = "forward pass done: AWAY; sent to C; refused by C; another peer is asked: AWAY; sent to D"
    with pytest.raises(InvalidTransition, match=story):
        middle.handle(jobs.BackwardDone(1, 8, 1.0, layout(1, 1)[:1], bytes(16)), 1.3)


def test_states_change_nowhere_but_in_move() -> None:
    found = []
    for path in sorted(Path(module.__file__).parent.glob("*.py")):
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign) else []
                names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Attribute)]
                found += [f"{path.stem}.{function.name}" for name in names if name.attr == "state"]
    assert found == ["execution.move"]


@pytest.mark.parametrize("kind", [StageExecution, *StageExecution.__subclasses__(), module.NextHop])
def test_no_kind_of_execution_has_more_than_eighteen_fields(kind: type) -> None:
    assert len(kind.__dataclass_fields__) <= 18  # type: ignore[attr-defined]
