"""Tags of the router's questions: they come back with the answers, and say what was asked."""

from dataclasses import dataclass
from typing import ClassVar

from decentral.comm.wire.transport import Tag


@dataclass(frozen=True, slots=True)
class RouteTag(Tag):
    """A question of the router."""


@dataclass(frozen=True, slots=True)
class ExecutionTag(RouteTag):
    """A question about the stage execution with this token. Answers to an earlier `attempt` are ignored."""

    token: int
    attempt: int


@dataclass(frozen=True, slots=True)
class OfferTag(ExecutionTag):
    """The question is an Offer."""


@dataclass(frozen=True, slots=True)
class PresenceTag(RouteTag):
    """The question is an Offer to a peer that has failed: whether it is there again."""


@dataclass(frozen=True, slots=True)
class ForwardTag(ExecutionTag):
    """The question is a ForwardRequest, whose answer takes as long as all computing from that peer on."""

    measures_link: ClassVar[bool] = False
    may_be_late: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class AuditTag(RouteTag):
    """The question is a ForwardRequest of the audit with this token."""

    token: int
    attempt: int
    measures_link: ClassVar[bool] = False
    may_be_late: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ForwardStatusTag(ExecutionTag):
    """The question is a ForwardStatusQuery."""


@dataclass(frozen=True, slots=True)
class CommitDecisionTag(RouteTag):
    """The question is a CommitDecision."""

    measures_link: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class CommitQueryTag(RouteTag):
    """The question is a CommitQuery."""
