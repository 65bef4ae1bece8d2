"""One table says which machine handles an event, the tag of an answer, a question, or what was found by a key."""

from dataclasses import dataclass

import pytest

from decentral.comm.wire.transport import Tag
from decentral.core.machine import Woke, log
from decentral.peers.runtime.handlers import Handlers


@dataclass(frozen=True)
class Base(Tag):
    number: int = 0


@dataclass(frozen=True)
class Derived(Base):
    pass


@dataclass(frozen=True)
class Special(Derived):
    pass


def table() -> Handlers:
    handlers = Handlers()
    handlers.register(lambda event, now: [log("base", told=event, now=now)], Base)
    handlers.register(lambda event, now: [log("special", told=event, now=now)], Special)
    return handlers


def test_an_event_goes_to_the_handler_of_its_class() -> None:
    assert table().handle(Base(1), Woke(), 2.0) == [log("base", told=Woke(), now=2.0)]


@pytest.mark.parametrize(("subject", "name"), [(Derived(), "base"), (Special(), "special")])
def test_a_class_without_a_handler_has_that_of_its_nearest_base(subject: Base, name: str) -> None:
    assert table().handle(subject, Woke(), 0.0) == [log(name, told=Woke(), now=0.0)]


def test_what_was_found_in_the_dht_goes_to_the_handler_of_its_key() -> None:
    handlers = table()
    handlers.register(lambda event, now: [log("plans")], "run/plan")
    assert handlers.handle("run/plan", Woke(), 0.0) == [log("plans")]
    assert handlers.find("run/peers") is None


def test_what_nobody_handles_has_no_effects() -> None:
    assert table().find(Woke()) is None
    assert table().handle(Woke(), Woke(), 0.0) == []


def test_a_class_has_one_handler() -> None:
    with pytest.raises(AssertionError, match="Base has a handler already"):
        table().register(lambda event, now: [], Derived, Base)
