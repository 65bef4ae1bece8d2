"""Held-out text is chosen by what it is: peers whose files differ a little hold out the same."""

import numpy as np
import numpy.typing as npt
import pytest

from decentral.core import rng
from decentral.data.corpora import Runs, divide

WINDOW, SHARE = 65, 0.1
Tokens = npt.NDArray[np.uint16]


def text(tokens: int, seed: int = 0) -> Tokens:
    """Tokens that repeat no window."""
    return rng.arrays(seed, "text").integers(0, 60_000, tokens).astype(np.uint16)


def windows(tokens: Tokens, runs: Runs) -> set[bytes]:
    pairs = zip(runs.starts.tolist(), runs.counts.tolist(), strict=True)
    return {tokens[start + at : start + at + WINDOW].tobytes() for start, count in pairs for at in range(count)}


def trained_share(ours: Tokens, theirs: Tokens) -> float:
    """Which share of the windows that we hold out another peer trains on."""
    kept = windows(ours, divide(ours, SHARE, WINDOW)[1])
    return len(kept & windows(theirs, divide(theirs, SHARE, WINDOW)[0])) / len(kept)


OURS = text(40_000)
OTHER_FILES = {
    "a file more before it": np.concatenate([text(777, 1), OURS]),
    "a file more within it": np.concatenate([OURS[:20_000], text(777, 1), OURS[20_000:]]),
    "its second half alone": OURS[20_000:],
    "its halves in another order": np.concatenate([OURS[20_000:], OURS[:20_000]]),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_what_one_peer_holds_out_no_other_trains_on(name: str) -> None:
    assert trained_share(OURS, OTHER_FILES[name]) < 0.03
    assert trained_share(OTHER_FILES[name], OURS) < 0.03


def test_an_edit_within_held_out_text_leaves_it_held_out() -> None:
    """One token in a thousand is another, so that a quarter of all stretches are edited."""
    ours = text(100_000)
    edited = ours.copy()
    edited[500::1000] += 1
    assert trained_share(ours, edited) < 0.12


def test_no_window_of_one_kind_has_a_token_of_the_other() -> None:
    train, held_out = divide(OURS, SHARE, WINDOW)
    kinds = np.zeros(len(OURS), np.int64)
    for runs, kind in ((train, 1), (held_out, 2)):
        for start, count in zip(runs.starts, runs.counts, strict=True):
            assert not kinds[start : start + count + WINDOW - 1].any()
            kinds[start : start + count + WINDOW - 1] = kind
    assert kinds.all()


@pytest.mark.parametrize("tokens", [np.zeros(20_000, np.uint16), np.tile(text(10), 2000)])
def test_a_text_that_repeats_itself_is_divided_too(tokens: Tokens) -> None:
    train, held_out = divide(tokens, SHARE, WINDOW)
    assert train.counts.min() >= 1
    assert held_out.counts.min() >= 1


def test_a_sample_is_of_all_places_alike() -> None:
    runs = Runs.of(np.array([0, 100, 300]), np.array([1, 10, 2]))
    found = set(runs.sample(np.random.default_rng(0), 1000).tolist())
    assert found == {0, *range(100, 110), 300, 301}
