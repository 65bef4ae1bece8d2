"""One table says which machine handles an event, the tag of an answer, a question, or what was found by a key."""

from dataclasses import dataclass

import pytest

from decentral.comm.wire.transport import Tag
from decentral.core.journal.events import ErrorLine
from decentral.core.machine import Log, Woke
from decentral.peers.runtime.handlers import Handlers, PeerEvent


@dataclass(frozen=True)
class Base(Tag):
    number: int = 0


@dataclass(frozen=True)
class Derived(Base):
    pass


@dataclass(frozen=True)
class Special(Derived):
    pass


def said(name: str, event: PeerEvent, now: float) -> Log:
    return Log(ErrorLine(reason=f"{name} {event} {now}"))


def table() -> Handlers:
    handlers = Handlers()
    handlers.register(lambda event, now: [said("base", event, now)], Base)
    handlers.register(lambda event, now: [said("special", event, now)], Special)
    return handlers


def test_an_event_goes_to_the_handler_of_its_class() -> None:
    assert table().handle(Base(1), Woke(), 2.0) == [said("base", Woke(), 2.0)]


@pytest.mark.parametrize(("subject", "name"), [(Derived(), "base"), (Special(), "special")])
def test_a_class_without_a_handler_has_that_of_its_nearest_base(subject: Base, name: str) -> None:
    assert table().handle(subject, Woke(), 0.0) == [said(name, Woke(), 0.0)]


def test_what_was_found_in_the_dht_goes_to_the_handler_of_its_key() -> None:
    handlers = table()
    handlers.register(lambda event, now: [Log(ErrorLine(reason="plans"))], "run/plan")
    assert handlers.handle("run/plan", Woke(), 0.0) == [Log(ErrorLine(reason="plans"))]
    assert handlers.find("run/peers") is None


def test_what_nobody_handles_has_no_effects() -> None:
    assert table().find(Woke()) is None
    assert table().handle(Woke(), Woke(), 0.0) == []


def test_a_class_has_one_handler() -> None:
    with pytest.raises(AssertionError, match="Base has a handler already"):
        table().register(lambda event, now: [], Derived, Base)
