"""What the questions of synchronous rounds are for: the tags that come back with their answers."""

from dataclasses import dataclass
from typing import ClassVar

from decentral.comm.wire.transport import Tag
from decentral.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class RoundTag(Tag):
    """A question of the rounds."""


@dataclass(frozen=True, slots=True)
class FollowTag(RoundTag):
    """RoundQuery of a peer that wants to be let in."""


@dataclass(frozen=True, slots=True)
class ElsewhereTag(RoundTag):
    """RoundQuery to a peer that trains, and is not in our round."""


@dataclass(frozen=True, slots=True)
class CollectTag(RoundTag):
    """CollectRequest: the report of `origin`, or its sum of a fragment's gradients. The answer waits for that member."""

    round: int
    origin: PeerId
    fragment: int | None

    measures_link: ClassVar[bool] = False
