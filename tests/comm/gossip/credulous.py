"""A peer that believes all that partners say: for tests of what rules keep where nobody lies."""

from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from decentral.comm.gossip.influence import Experience, Outliers
from decentral.comm.gossip.pull_rule import PullRule
from decentral.comm.gossip.trust import Agreement, CopiedParts, CountedWindows, PartnerHistory
from decentral.comm.gossip.update_rules import UpdateRule
from decentral.core.ids import PeerId


class Credulous(Experience):
    """Partners may go any way at once."""

    @property
    def progress(self) -> float:
        return float("inf")


class Trustful(Agreement):
    """Partners may go anywhere."""

    def trust(self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        return [1.0] * len(partners)


class Anywhere(Outliers):
    """Partners' weights may be anywhere, and they count all the same."""

    def trust(self, partners: Sequence[tuple[PeerId, Tensor]], steps: Sequence[float]) -> list[float]:
        return [1.0] * len(partners)


class AllNew(CountedWindows):
    """Nobody copies."""

    def copied_parts(
        self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]], known: float | None
    ) -> CopiedParts:
        count, none = range(len(partners)), [0.0] * len(partners)
        return CopiedParts(none, [[float(one == other) for other in count] for one in count], none)


def no_history() -> PartnerHistory:
    """What a peer without defences knows of its partners."""
    believers = Credulous(), Trustful(), Anywhere(), AllNew()
    assert len(believers) == len(fields(PartnerHistory)), "a defence of PartnerHistory has nothing here to replace it"
    return PartnerHistory(*believers)


def believe_all(rule: UpdateRule) -> None:
    if isinstance(rule, PullRule):
        rule.history = no_history()
