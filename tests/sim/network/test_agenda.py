"""Virtual time: everything in order, and nothing that was called off."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.sim.network.agenda import Agenda
from tests.sim.network.next_action import next_at


@pytest.fixture
def agenda() -> Agenda:
    return Agenda()


@given(st.lists(st.integers(0, 5)))
def test_things_happen_in_the_order_of_their_times_and_then_of_asking(times: list[int]) -> None:
    agenda, happened = Agenda(), list[tuple[float, int]]()
    for number, when in enumerate(times):
        agenda.at(when, lambda number=number: happened.append((agenda.now, number)))  # type: ignore[misc]
    agenda.run(10)
    assert happened == sorted((float(when), number) for number, when in enumerate(times))


def test_an_action_sees_its_own_time_and_the_clock_ends_where_it_was_told_to(agenda: Agenda) -> None:
    seen: list[float] = []
    agenda.after(2.5, lambda: seen.append(agenda.now))
    agenda.run(4)
    assert (seen, agenda.now) == ([2.5], 4)


def test_what_is_later_waits(agenda: Agenda) -> None:
    happened: list[str] = []
    agenda.at(3, lambda: happened.append("later"))
    agenda.run(2.9)
    assert (happened, next_at(agenda)) == ([], 3)
    agenda.run(3)
    assert (happened, next_at(agenda)) == (["later"], None)


def test_what_an_action_asks_for_happens_in_the_same_run(agenda: Agenda) -> None:
    happened: list[float] = []

    def again() -> None:
        happened.append(agenda.now)
        agenda.after(1, again)

    again()
    agenda.run(3)
    assert happened == [0, 1, 2, 3]


def test_what_should_have_happened_before_happens_now(agenda: Agenda) -> None:
    agenda.run(5)
    happened: list[float] = []
    agenda.at(1, lambda: happened.append(agenda.now))
    agenda.run(5)
    assert happened == [5]


def test_what_was_called_off_does_not_happen_and_is_not_counted(agenda: Agenda) -> None:
    happened: list[str] = []
    agenda.at(1, lambda: happened.append("off")).cancel()
    agenda.at(2, lambda: happened.append("on"))
    assert next_at(agenda) == 2
    agenda.run(2)
    assert (happened, agenda.events) == (["on"], 1)


def test_it_may_be_called_off_twice_and_after_it_has_happened(agenda: Agenda) -> None:
    timer = agenda.at(1, lambda: None)
    agenda.run(1)
    timer.cancel()
    timer.cancel()
    assert next_at(agenda) is None
