"""Peers without defences really have none: otherwise a comparison with them would say nothing."""

import pytest
import torch

from decentral.comm.gossip import influence, pull_rule
from decentral.comm.gossip.snapshots import TokenClaims
from decentral.comm.gossip.trust import PartnerHistory
from decentral.core.ids import PeerId
from tests.hostile.credulous import without_defences

LIAR = PeerId("liar")


def share_of_a_liar() -> float:
    """Of a merge with a partner that claims a thousand times our tokens, and whose direction nobody trusts."""
    claimed = TokenClaims().covered(LIAR, 100_000, 1.0, 1.0)
    (share,) = influence.token_shares(100, [claimed], [0.0])
    return share


def test_who_has_no_defences_takes_nearly_all_from_whoever_claims_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_of_a_liar() == 0.0
    without_defences(monkeypatch.setattr)
    assert share_of_a_liar() > 0.99


def test_and_takes_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert influence.scale(1e6, new_history().experience.progress) == 0.0
    without_defences(monkeypatch.setattr)
    assert influence.scale(1e6, new_history().experience.progress) == 1.0


def test_and_goes_to_weights_that_are_nowhere_near_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = [(PeerId(name), torch.full((8,), 0.1 * at)) for at, name in enumerate("abc")]
    weights = [*honest, (LIAR, torch.full((8,), 9.0))]
    outliers = new_history().outliers
    assert outliers.trust(weights, [1.0] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert outliers.is_far(LIAR)
    without_defences(monkeypatch.setattr)
    outliers = new_history().outliers
    assert outliers.trust(weights, [1.0] * 4) == [1.0] * 4
    assert not outliers.is_far(LIAR)


def test_and_counts_a_copy_as_if_it_were_new(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other, copied = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    windows = [(PeerId("a"), copied), (PeerId("b"), other), (LIAR, copied)]
    assert new_history().counted.copied_parts(ours, windows, 0.0).new() == [0.5, 1.0, 0.5]
    without_defences(monkeypatch.setattr)
    assert new_history().counted.copied_parts(ours, windows, 0.0).new() == [1.0, 1.0, 1.0]


def new_history() -> PartnerHistory:
    """What a rule that is made now knows of its partners."""
    found = vars(pull_rule)["PartnerHistory"]()
    assert isinstance(found, PartnerHistory)
    return found
