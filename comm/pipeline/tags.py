"""Tags that identify the router's questions to other peers. The outcome of a question has the question's tag."""

from dataclasses import dataclass
from typing import ClassVar

from decentral.comm.wire.transport import Tag


@dataclass(frozen=True, slots=True)
class RouteTag(Tag):
    """Common base of the tags of all questions that the router asks other peers."""


@dataclass(frozen=True, slots=True)
class ExecutionTag(RouteTag):
    """The tag of a question about a stage execution. An answer to any but the latest attempt is ignored."""

    local_id: int  # id of the stage execution at this peer
    attempt: int  # number of the attempt to pass the execution to another peer


@dataclass(frozen=True, slots=True)
class OfferTag(ExecutionTag):
    """The tag of an Offer."""


@dataclass(frozen=True, slots=True)
class PresenceTag(RouteTag):
    """The tag of an Offer that only tests whether a peer that has failed answers again."""


@dataclass(frozen=True, slots=True)
class ForwardTag(ExecutionTag):
    """The tag of a ForwardRequest, which is answered when all peers up to the model's end have computed."""

    measures_link: ClassVar[bool] = False
    may_be_late: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class AuditTag(RouteTag):
    """The tag of a ForwardRequest with which the audit `local_id` has an answer recomputed.

    An answer to any but the audit's latest attempt is ignored.
    """

    local_id: int
    attempt: int
    measures_link: ClassVar[bool] = False
    may_be_late: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ForwardStatusTag(ExecutionTag):
    """The tag of a ForwardStatusQuery."""


@dataclass(frozen=True, slots=True)
class CommitDecisionTag(RouteTag):
    """The tag of a CommitDecision."""

    measures_link: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class CommitQueryTag(RouteTag):
    """The tag of a CommitQuery."""
