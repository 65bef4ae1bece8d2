"""Peers without defences really have none: otherwise a comparison with them would say nothing."""

import pytest

from decentral.algorithms import pull
from decentral.comm.gossip.token_claims import TokenClaims
from decentral.core.ids import PeerId
from decentral.train import influence
from tests.hostile.credulous import without_defences

LIAR = PeerId("liar")


def share_of_a_liar() -> float:
    """Of a merge with a partner that claims a thousand times our tokens, and whose direction nobody trusts."""
    claimed = TokenClaims().believed(LIAR, 100_000, 1.0, 1.0)
    (share,) = influence.token_shares(100, [claimed], [0.0])
    return share


def test_who_has_no_defences_takes_nearly_all_from_whoever_claims_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_of_a_liar() == 0.0
    without_defences(monkeypatch.setattr)
    assert share_of_a_liar() > 0.99


def test_and_takes_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert influence.scale(1e6, new_experience().progress) == 0.0
    without_defences(monkeypatch.setattr)
    assert influence.scale(1e6, new_experience().progress) == 1.0


def new_experience() -> influence.Experience:
    """As a rule makes it."""
    found = vars(pull)["Experience"]()
    assert isinstance(found, influence.Experience)
    return found
