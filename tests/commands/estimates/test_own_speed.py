"""How long a step takes on this machine, for models that are too large to be timed."""

import pytest
import torch

from decentral.comm.codecs import blockwise
from decentral.commands.estimates import own_speed, sizes
from decentral.commands.estimates.own_speed import OwnSpeed
from decentral.commands.estimates.traffic import NUMBER_S
from decentral.core import config
from decentral.core.config import Config

FLOPS_PER_S = 1e9


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The runs that were timed, on a machine that computes FLOPS_PER_S."""
    runs: list[Config] = []

    def step(run: Config, timed_s: float, windows: int) -> OwnSpeed:
        runs.append(run)
        tokens = int(run.train.micro_batch) * run.train.accumulate * run.model.context
        return OwnSpeed(sum(run.model.layer_flops) * tokens / FLOPS_PER_S, NUMBER_S)

    monkeypatch.setattr(own_speed, "_timed", step)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(own_speed, "keep_what_is_freed", lambda: None)
    return runs


def run_of(size: str, *overrides: str) -> Config:
    return sizes.with_shape(config.load(None, ["train.micro_batch=8", *overrides]), size, frozenset())


@pytest.mark.parametrize("size", ["1M", "85M", "350M", "1B", "70B"])
def test_a_step_takes_the_time_of_its_flops_whatever_is_timed(size: str, timed: list[Config]) -> None:
    run = run_of(size)
    tokens = 8 * run.train.accumulate * run.model.context
    assert own_speed._alone(run, 1, 1.0, 0).step_s == pytest.approx(sum(run.model.layer_flops) * tokens / FLOPS_PER_S)


@pytest.mark.parametrize("size", ["85M", "350M", "1B", "70B"])
def test_no_model_is_timed_whose_step_takes_minutes(size: str, timed: list[Config]) -> None:
    run = run_of(size)
    many_tokens = run.model_copy(update={"model": run.model.model_copy(update={"vocabulary": 128_000})})
    own_speed._alone(many_tokens, 1, 1.0, 0)
    assert max(sum(one.model.layer_parameters[1:]) for one in timed) <= own_speed.MOST_PARAMETERS


def test_a_window_of_gossip_is_timed_by_the_jobs_of_a_running_peer() -> None:
    """Its cost was that of the kernels alone on one machine, 0.4 of what peers of 85 M parameters paid."""
    shape = ["model.depth=1", "model.width=32", "model.vocabulary=256", "model.context=16", "train.micro_batch=1"]
    found, briefly = (own_speed._timed(config.load(None, shape), 0.0, windows) for windows in (2, 0))
    assert found.step_s > 0
    assert 0 < found.number_s < 1e-3
    assert briefly.number_s == 0


@pytest.mark.parametrize("code", ["q4", *blockwise.SHORTER_CODECS])
def test_windows_of_each_code_can_be_timed(code: str) -> None:
    shape = ["model.depth=1", "model.width=32", "model.vocabulary=256", "model.context=16", "train.micro_batch=1"]
    found = own_speed._timed(config.load(None, [*shape, f"gossip.code={code}"]), 0.0, 2)
    assert found.step_s > 0
    assert found.number_s > 0


def test_a_narrow_model_s_tokens_shrink_like_its_width() -> None:
    run = run_of("1B")
    narrow = own_speed.narrowed(run)
    assert narrow.train.micro_batch == max(1, round(8 * narrow.model.d_model / run.model.d_model))
    assert narrow.model.n_heads * narrow.model.d_head == narrow.model.d_model


def test_a_narrow_model_keeps_the_share_of_channels_that_blocks_change() -> None:
    run = run_of("1B")
    bottleneck = run.model.model_copy(update={"bottleneck": run.model.d_model // 4})
    narrow = own_speed.narrowed(run.model_copy(update={"model": bottleneck})).model
    assert narrow.d_written == narrow.d_model // 4
