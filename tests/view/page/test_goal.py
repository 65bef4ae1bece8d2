"""How far peers are towards --stop-after, by their journals."""

import pytest

from decentral.view.page.goal import GoalView, amount_of, goal_json, towards_time
from tests.journal_lines import event_of


def peer(goal: str, steps: int = 0) -> GoalView:
    """A peer that has gone on at step 100, joined at 10 s, and then taken a step of 50 tokens each second."""
    found = GoalView()
    found.take(5.0, event_of("started", stop_after=goal))
    found.take(10.0, event_of("joined"))
    for number in range(1, steps + 1):
        found.take(10.0 + number, event_of("step", step=100 + number, tokens=50, loss=1.0))
    return found


def test_a_goal_in_seconds_counts_from_the_join() -> None:
    assert peer("90s").towards(55.0) == (0.5, 45.0)
    assert peer("90s").towards(200.0) == (1.0, 0.0)


def test_a_goal_in_steps_or_tokens_has_the_time_left_at_the_present_pace() -> None:
    assert peer("400steps").towards(20.0) == (0.0, None)
    share, left_s = peer("400steps", steps=101).towards(110.0) or (0.0, None)
    assert [share, left_s] == pytest.approx([201 / 400, 199.0])
    share, left_s = peer("10000tokens", steps=100).towards(110.0) or (0.0, None)
    assert [share, left_s] == pytest.approx([0.5, 100.0])


@pytest.mark.parametrize("text", ["", "soon", "-5s", "1e99999steps"])
def test_without_a_goal_nothing_is_shown(text: str) -> None:
    assert peer(text, steps=3).towards(50.0) is None


def test_a_swarm_is_as_far_as_its_slowest_peer() -> None:
    assert goal_json("90s", [(0.5, 45.0), (0.25, 67.4)]) == {"text": "90s", "share": 0.25, "left_s": 67}
    assert goal_json("90s", [(0.5, None)]) == {"text": "90s", "share": 0.5, "left_s": -1}
    assert goal_json("90s", []) == {}
    assert towards_time(90.0, 0.0, -5.0) == (0.0, 90.0)
    assert amount_of("500steps") is not None
