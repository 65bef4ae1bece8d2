"""Peers without defences: the bounds on what one partner may do are replaced by what they bound."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from decentral.comm.gossip import influence, pull_rule
from decentral.comm.gossip.snapshots import TokenClaims
from tests.comm.gossip.credulous import no_history

Replace = Callable[[object, str, Any], None]
"""setattr, or pytest's monkeypatch.setattr."""


def without_defences(replace: Replace) -> None:
    """All rules that are made from now on believe what partners claim."""
    replace(pull_rule, "PartnerHistory", no_history)
    replace(influence, "token_shares", believed_shares)
    replace(influence, "explained_tokens", lambda length, own, own_length: math.inf)
    replace(TokenClaims, "covered", lambda self, peer, tokens, tokens_per_s, now: tokens)


def believed_shares(own: int, claims: Sequence[int], trust: Sequence[float] = ()) -> list[float]:
    """Each partner's share of a merge, as its tokens say."""
    total = own + sum(claims)
    return [claim / total for claim in claims] if total else [1 / (1 + len(claims))] * len(claims)
