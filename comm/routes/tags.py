"""What the router's questions are for: the tags that come back with their answers."""

from dataclasses import dataclass
from typing import ClassVar

from decentral.comm.wire.transport import Tag


@dataclass(frozen=True, slots=True)
class RouteTag(Tag):
    """A question of the router."""


@dataclass(frozen=True, slots=True)
class ExecutionTag(RouteTag):
    """A question about the stage execution with this token here. Answers to an earlier `attempt` tell nothing."""

    token: int
    attempt: int


@dataclass(frozen=True, slots=True)
class OfferTag(ExecutionTag):
    """Offer: how much does that peer have to do?"""


@dataclass(frozen=True, slots=True)
class ForwardTag(ExecutionTag):
    """ForwardRequest. The answer takes as long as all the computing behind that peer."""

    measures_link: ClassVar[bool] = False
    waits_for_work: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ForwardStatusTag(ExecutionTag):
    """ForwardStatusQuery: is that peer still at it?"""


@dataclass(frozen=True, slots=True)
class CommitDecisionTag(RouteTag):
    """CommitDecision: that peer is told what counts."""

    measures_link: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class CommitQueryTag(RouteTag):
    """CommitQuery: what became of that peer's micro-batches?"""
