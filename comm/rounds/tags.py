"""Tags of the questions of synchronous rounds. A tag comes back with the answer to its question."""

from dataclasses import dataclass
from typing import ClassVar

from decentral.comm.wire.transport import Tag
from decentral.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class RoundTag(Tag):
    """Any question of the rounds."""


@dataclass(frozen=True, slots=True)
class FollowTag(RoundTag):
    """A RoundQuery by a peer that wants to be let in."""


@dataclass(frozen=True, slots=True)
class ElsewhereTag(RoundTag):
    """A RoundQuery to a peer that trains and is not in our round."""


@dataclass(frozen=True, slots=True)
class CollectTag(RoundTag):
    """A CollectRequest for the report of `origin` or, if `fragment` is given, its sum of that fragment's gradients.

    The answer waits until that member is done, so it tells nothing about the link.
    """

    round: int
    origin: PeerId
    fragment: int | None

    measures_link: ClassVar[bool] = False
