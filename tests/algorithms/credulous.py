"""A peer that believes all that partners say: for tests of what rules keep where nobody lies."""

from collections.abc import Sequence

from torch import Tensor

from decentral.algorithms.pull import PullRule
from decentral.core.ids import PeerId
from decentral.train.agreement import Agreement
from decentral.train.bounded_rule import BoundedRule
from decentral.train.influence import Experience
from decentral.train.update_rules import UpdateRule


class Credulous(Experience):
    """Partners may be anywhere."""

    @property
    def progress(self) -> float:
        return float("inf")


class Trustful(Agreement):
    """Partners may go anywhere."""

    def trust(self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        return [1.0] * len(partners)


def believe_all(rule: UpdateRule) -> None:
    assert isinstance(rule, BoundedRule | PullRule)
    rule.experience = Credulous()
    if isinstance(rule, PullRule):
        rule.agreement = Trustful()
