"""One table says which machine handles an event, the tag of an answer, or a question."""

from dataclasses import dataclass

import pytest

from decentral.core.machine import Effect
from decentral.peers.node.handlers import Handlers


@dataclass(frozen=True)
class Base:
    number: int = 0


@dataclass(frozen=True)
class Derived(Base):
    pass


@dataclass(frozen=True)
class Special(Derived):
    pass


def table() -> Handlers:
    handlers = Handlers()
    handlers.register(lambda event, now: ["base", event, now], Base)
    handlers.register(lambda event, now: ["special", event, now], Special)
    return handlers


def test_an_event_goes_to_the_handler_of_its_class() -> None:
    assert table().handle(Base(1), "event", 2.0) == ["base", "event", 2.0]


@pytest.mark.parametrize(("subject", "name"), [(Derived(), "base"), (Special(), "special")])
def test_a_class_without_a_handler_has_that_of_its_nearest_base(subject: Base, name: str) -> None:
    effects: list[Effect] = table().handle(subject, subject, 0.0)
    assert effects[0] == name


def test_what_nobody_handles_has_no_effects() -> None:
    assert table().find("a word") is None
    assert table().handle("a word", "a word", 0.0) == []


def test_a_class_has_one_handler() -> None:
    with pytest.raises(AssertionError, match="Base has a handler already"):
        table().register(lambda event, now: [], Derived, Base)
