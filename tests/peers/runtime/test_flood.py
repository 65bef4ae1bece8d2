"""A flood of every kind of question from many names, on a real node: whatever others can make grow has its limit.

A walk through all that the node reaches finds the containers by themselves, so that a new one without a limit fails.
"""

import dataclasses
from collections import deque
from collections.abc import Collection, Iterator
from enum import Enum
from random import Random
from typing import Any

import pytest

from decentral.comm.wire import messages
from decentral.comm.wire.messages import ExecutionId, ForwardRequest, Message
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.peers.runtime.handlers import PeerEffect
from tests.fuzz.grammar import QUESTIONS
from tests.peers.runtime.test_node import ALGORITHMS, BLOB, LAYOUT, NOW, RUN, Algorithm, Played

EACH = 1300  # names, each of which asks a question of each kind
MOST = 1040  # entries of any container that the flood made larger; the largest limits of those are 1024


class Slow(Played):
    """Its device never ends a stage execution, so that they pile up as far as they may."""

    def carry(self, effects: list[PeerEffect]) -> None:
        super().carry([effect for effect in effects if not isinstance(effect, jobs.Forward | jobs.Seal)])


def questions(number: int, now: float, chance: Random) -> list[tuple[Message, bytes]]:
    """One of each kind, which differ from those before."""
    fragment, origin = number % 2, f"origin{number % 97}"
    id, late = ExecutionId(origin, number, 1), chance.choice((0.0, 5.0, 75.0))
    return [
        (messages.Hello(), b""),
        (messages.Ping(number), b""),
        (messages.Probe(number % 100), b""),
        (messages.Pull(RUN, fragment, number, now, late), b""),
        (messages.StateRequest(RUN, fragment, 0, 5), b""),
        (messages.LeaseRequest(RUN, fragment), b""),
        (messages.Offer(RUN, 1, 1), b""),
        (ForwardRequest(RUN, origin, number, 1, 1, 3000.0, 3000.0, LAYOUT, 1 if number < EACH - 50 else 0), BLOB),
        (messages.ForwardStatusQuery(RUN, id), b""),
        (messages.CommitDecision(RUN, (), (id,)), b""),
        (messages.CommitQuery(RUN, (id,)), b""),
        (messages.RecordsQuery(RUN, b"", (number.to_bytes(8),)), b""),
        (messages.RoundQuery(RUN, number % 5, 0, 3, True), b""),
        (messages.CollectRequest(RUN, number % 5, origin, None, late, False), b""),
    ]


def test_the_flood_has_every_kind_of_question() -> None:
    kinds = {type(message) for message, _ in questions(0, NOW, Random(0))}
    assert kinds == set(QUESTIONS), "add each to `questions` of tests/peers/runtime/test_flood.py"


def containers(root: object) -> Iterator[tuple[str, Collection[Any]]]:
    """The name and the value of every container that the object reaches."""
    seen, left = set[int](), [("node", root)]
    while left:
        name, one = left.pop()
        if id(one) in seen or isinstance(one, str | bytes | int | float | Enum | type | Random | range):
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | set | deque):
            yield name, one
            left += [(f"{name}[]", value) for value in (one.values() if isinstance(one, dict) else one)]
        elif type(one).__module__.startswith("decentral."):
            slots = [slot for kind in type(one).__mro__ for slot in getattr(kind, "__slots__", ())]
            names = {*slots, *getattr(one, "__dict__", {})}
            left += [(f"{name}.{attribute}", getattr(one, attribute, None)) for attribute in names]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_container_of_a_node_grows_with_a_flood(algorithm: Algorithm) -> None:
    played, chance = Slow(algorithm, "training", window_s=1e5), Random(0)
    entry = played.node.roster.live[played.known.peer]
    names = [PeerId(f"name{number}") for number in range(EACH)]
    for name in names[EACH // 10 :]:  # most of them have a record, which says that they hold everything
        played.node.roster.live[name] = dataclasses.replace(entry, expires=NOW + 1e6)
        played.node.roster.holders.put(name, entry.record)
    before = {name: len(one) for name, one in containers(played.node)}
    for number in range(EACH):
        for kind, (message, blob) in enumerate(questions(number, played.now, chance)):
            played.ask(16 * number + kind, names[number], message, blob)
    after = {name: len(one) for name, one in containers(played.node)}
    grown = {name: size for name, size in after.items() if size > max(MOST, before.get(name, 0))}
    assert not grown, grown
    assert len(before) > 50  # the walk has found the node's parts
    played.pass_time(100.0)
    assert len(played.node.answers.waiting) <= 4  # all but those that the device has
