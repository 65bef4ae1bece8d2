"""Every field that a stranger fills has a bound."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import pytest
from pydantic import BaseModel, Field

from decentral.comm.wire.messages import Message
from decentral.peers.membership.records import PeerRecord
from decentral.scheduler.placement.evaluate import SwarmPlan
from tests.core.bounds import unbounded


@pytest.mark.parametrize("kind", [*Message.__args__, PeerRecord, SwarmPlan], ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_a_record_and_a_plan_has_bounds(kind: type) -> None:
    assert unbounded(kind) == []


@dataclass
class Inner:
    one: Annotated[tuple[int, ...], Field(max_length=3)]
    two: tuple[Annotated[str, Field(max_length=3)], ...]
    three: Annotated[bytes, Field(max_length=3)]


class Row(NamedTuple):
    one: int
    two: Annotated[int, Field(ge=0, lt=9)]


class Unlimited(BaseModel):
    one: int
    two: Annotated[int, Field(gt=0)] | None
    three: str
    four: list[int]
    five: Annotated[float, Field(gt=0, le=1)]
    six: Inner
    seven: Row


def test_a_field_without_bounds_is_found() -> None:
    found = unbounded(Unlimited)
    assert [path.partition(".")[0] for path in found] == ["one", "two", "three", "four", "six", "six", "seven"]
    assert found[-3:] == ["six.one.a number", "six.two.a row", "seven.one.a number"]
