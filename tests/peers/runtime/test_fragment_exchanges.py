"""The exchanges of the fragments that a peer holds come and go with moves, and with moves that fail."""

from pathlib import Path

import pytest

from decentral.comm.wire.identity import Identity
from decentral.peers.runtime.fragment_exchanges import FragmentExchanges
from tests.peers.runtime.test_peer_selection import FRAGMENTS, Swarm


@pytest.fixture
def exchanges(tmp_path: Path) -> FragmentExchanges:
    selection = Swarm(Identity.load_or_create(tmp_path / "identity.key")).asks
    return FragmentExchanges(selection.setup, selection)


def restored_at(exchanges: FragmentExchanges, index: int) -> float:
    return exchanges.running[index].context.restored_at


def test_a_newcomer_merges_windows_of_before_it_began(exchanges: FragmentExchanges) -> None:
    exchanges.begin(100.0)
    assert [restored_at(exchanges, one.index) for one in FRAGMENTS] == [0.0, 0.0]


def test_a_fragment_that_comes_back_takes_no_window_of_before_as_it_may_have_merged_it(
    exchanges: FragmentExchanges,
) -> None:
    """A move failed for a full disk, and what it would have given up began to gossip anew (seed 46615 of the sweep)."""
    exchanges.begin(100.0)
    exchanges.drop([1])
    assert list(exchanges.running) == [0]
    exchanges.begin(200.0)
    assert [restored_at(exchanges, one.index) for one in FRAGMENTS] == [0.0, 200.0]
