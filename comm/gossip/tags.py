"""What the questions of exchanges are for: the tags that come back with their answers."""

from dataclasses import dataclass
from typing import ClassVar

from decentral.comm.wire.transport import Tag


@dataclass(frozen=True, slots=True)
class ExchangeTag(Tag):
    """A question of a fragment's exchange. Answers to an earlier window `seq` tell nothing."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class PullTag(ExchangeTag):
    """Pull: the answer comes at once, or after a short patience."""


@dataclass(frozen=True, slots=True)
class BlockingPullTag(ExchangeTag):
    """Pull of a blocking algorithm: the answer waits until the partner has closed the same window."""

    measures_link: ClassVar[bool] = False
