"""Tags that identify the pulls of gossip exchanges. The answer to a pull has the same tag as the pull."""

from dataclasses import dataclass
from typing import ClassVar

from decentral.comm.wire.transport import Tag


@dataclass(frozen=True, slots=True)
class ExchangeTag(Tag):
    """Base class of the tags of pulls. An answer is dropped if `seq` is the number of an earlier window."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class PullTag(ExchangeTag):
    """The tag of a pull that is answered at once, or after a short wait for the partner's next window."""


@dataclass(frozen=True, slots=True)
class BlockingPullTag(ExchangeTag):
    """The tag of a pull of a blocking algorithm.

    The answer waits until the partner has closed the same window, so its delay does not measure the link.
    """

    measures_link: ClassVar[bool] = False
