"""What a run has saved: whose weights count at a moment, and which loss a user would have."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.contest import ours
from benchmarks.contest.contestants import MODEL
from benchmarks.contest.evaluate import Evaluation, Losses, Saved, latest, saved_in
from decentral.core import config
from decentral.engine import memory
from decentral.model import decoder

SMALL = ["model.depth=1", "model.width=16", "model.context=16"]


def test_files_say_who_saved_them_and_when(tmp_path: Path) -> None:
    for name in ("1-0-1795425002.250.npy", "0-0-1795425001.500.npy", "2-1-1795425003.000.part", "journal-0-0.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "3-0-1795425000.000.kept").mkdir()
    found = [(one.peer, one.at) for one in saved_in(tmp_path)]
    assert found == [("3-0", 1795425000.0), ("0-0", 1795425001.5), ("1-0", 1795425002.25)]


def test_at_a_moment_each_living_peer_s_last_weights_count() -> None:
    saved = [Saved(peer, at, Path(f"{peer}-{at}")) for peer, at in (("0-0", 1.0), ("1-0", 1.5), ("0-0", 4.0))]
    assert {one.path.name for one in latest(saved, 3.0, {}).values()} == {"0-0-1.0", "1-0-1.5"}
    assert {one.path.name for one in latest(saved, 4.0, {"1-0": 2.0}).values()} == {"0-0-4.0"}
    assert latest(saved, 0.5, {}) == {}


def test_a_user_keeps_the_better_of_the_mean_and_the_first_peer() -> None:
    assert Losses(2.0, 1.5, 4).kept == 1.5
    assert Losses(2.0, None, 4).kept == 2.0


def test_losses_are_those_of_the_saved_weights_and_of_their_mean(tmp_path: Path) -> None:
    run = config.load(None, SMALL)
    drawn = [p.detach().flatten() for layer in decoder.build(run.model, 0) for p in layer.parameters()]
    weights = torch.cat(drawn)
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(0))
    saved = []
    for place, vector in enumerate((weights + noise, weights - noise)):
        path = tmp_path / f"{place}-0-5.000.npy"
        np.save(path, vector.numpy())
        saved.append(Saved(f"{place}-0", 5.0, path))
    before, after = Evaluation(SMALL).losses(saved, [4.0, 6.0], {})
    assert before is None
    assert after is not None
    assert after.first is not None
    assert after.peers == 2
    assert after.mean == pytest.approx(5.55, abs=0.1)  # the noise is gone: a model that knows nothing of 256 bytes
    assert after.first > after.mean
    assert Evaluation(SMALL).smoothed(saved, [4.0, 6.0], {}) == pytest.approx(after.mean)


def test_half_the_memory_holds_a_fragment_and_not_the_model() -> None:
    overrides = [*MODEL, *ours.OF_PARTS]
    needs = memory.needs(config.load(None, overrides))
    size = int(ours.half_the_memory(overrides)[1])
    assert max(needs.span_bytes(number, number + 1) for number in range(len(needs.fragments))) <= size
    assert size < needs.span_bytes(0, len(needs.fragments))
