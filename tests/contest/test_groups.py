"""The group that gloo's contestants form, over loopback: means, newcomers, and whose state counts."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from socket import socket
from typing import TypeVar

import pytest
import torch

from benchmarks.contest import groups
from benchmarks.contest.groups import Group, Lost
from tests.patient_time import LIMIT_S

Result = TypeVar("Result")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port for the store; no member is taken for dead because its machine is busy."""
    for limit in ("START_S", "FORMING_S", "DEAD_S"):
        monkeypatch.setattr(groups, limit, LIMIT_S)
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(groups, "PORT", free.getsockname()[1])


def member(place: int, life: int, peers: int) -> Group:
    group = Group(f"{place}-{life}", place == 0, "127.0.0.1", peers, LIMIT_S)
    group.interface = "lo"
    return group


def together(*calls: Callable[[], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [done.result(LIMIT_S) for done in [threads.submit(call) for call in calls]]


def test_members_average_and_let_a_newcomer_in_who_takes_the_state_of_the_farthest(port: None) -> None:
    first, second = member(0, 0, 2), member(1, 0, 2)
    together(lambda: first.form(first=True), lambda: second.form(first=True))
    means = together(lambda: first.mean(torch.tensor([1.0, 2.0])), lambda: second.mean(torch.tensor([3.0, 6.0]), False))
    assert [mean.tolist() for mean, _ in means] == [[2.0, 4.0]] * 2
    assert [waits for _, waits in means] == [False, False]

    late = member(2, 1, 2)
    with ThreadPoolExecutor(1) as waiting:
        entry = waiting.submit(late.form)
        while not first.someone_waits():
            pass
        told = together(lambda: first.mean(torch.ones(1)), lambda: second.mean(torch.ones(1)))
        assert [waits for _, waits in told] == [True, True]
        together(first.form, second.form)
        entry.result(LIMIT_S)
    members = [first, second, late]
    assert {one.size for one in members} == {3}

    states = [[torch.full((2,), value)] for value in (5.0, 5.0, 0.0)]
    calls = [partial(one.agree, state, far) for one, state, far in zip(members, states, (7, 7, 0), strict=True)]
    assert together(*calls) == [7, 7, 7]
    assert [state[0].tolist() for state in states] == [[5.0, 5.0]] * 3


def test_a_collective_without_a_group_is_lost(port: None) -> None:
    with pytest.raises(Lost):
        member(0, 0, 1).mean(torch.ones(1))
