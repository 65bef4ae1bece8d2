"""Tags that a peer attaches to its questions in synchronous rounds. The answer to a question returns its tag."""

from dataclasses import dataclass
from typing import ClassVar

from decentral.comm.wire.transport import Tag
from decentral.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class RoundTag(Tag):
    """Base class of the tags of questions in synchronous rounds."""


@dataclass(frozen=True, slots=True)
class FollowTag(RoundTag):
    """The tag of a RoundQuery that asks a peer which round it is in, and also asks it to admit us as a member."""


@dataclass(frozen=True, slots=True)
class ElsewhereTag(RoundTag):
    """The tag of a RoundQuery to a peer that trains but is not in our round.

    After a network split that peer may be in another round, which may take precedence over ours.
    """


@dataclass(frozen=True, slots=True)
class CollectTag(RoundTag):
    """The tag of a CollectRequest for the report of `origin` or, if `fragment` is given, for its sum of gradients.

    The answer may wait until the report or sum is ready, so its delay does not measure the link.
    """

    round: int
    origin: PeerId
    fragment: int | None

    measures_link: ClassVar[bool] = False
