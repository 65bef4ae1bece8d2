"""The optimizer that contestants with libraries of their own use takes the same steps as ours."""

import pytest
import torch
from torch import nn

from benchmarks.contest.optimizer import MuonAdamW, groups
from decentral.core import config
from decentral.core.choices import OPTIMIZERS
from decentral.engine.fragment import Live, fragments_of
from decentral.engine.inner import Inner
from decentral.engine.step import Chain
from decentral.model import decoder

SMALL = ["model.depth=2", "model.width=32", "model.context=16", "train.learning_rate=0.01"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_steps_change_the_weights_as_our_optimizer_does(optimizer: str) -> None:
    run = config.load(None, [*SMALL, f"train.optimizer={optimizer}"])
    ours, theirs = decoder.build(run.model, 0), decoder.build(run.model, 0)
    inner = Inner([Live(one, ours, torch.device("cpu"), run.train) for one in fragments_of(run)], run.train)
    other = MuonAdamW(groups(theirs, run.train), run.train)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens_BT = torch.randint(256, (2, 17), generator=generator)
        inner.zero_grad()
        other.zero_grad()
        for layers in (ours, theirs):
            Chain(layers).loss(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()  # type: ignore[no-untyped-call]
        inner.clip()
        inner.step_all(0.01, 32)
        nn.utils.clip_grad_norm_(nn.Sequential(*theirs).parameters(), run.train.clip_norm)
        other.step()
    for mine, their in zip(nn.Sequential(*ours).parameters(), nn.Sequential(*theirs).parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-6)


def test_every_parameter_is_in_one_group() -> None:
    run = config.load(None, SMALL)
    layers = decoder.build(run.model, 0)
    counted = sum(one.numel() for group in groups(layers, run.train) for one in group["params"])
    assert counted == sum(run.model.layer_parameters)


def test_the_state_s_vectors_are_there_before_the_first_step() -> None:
    run = config.load(None, SMALL)
    other = MuonAdamW(groups(decoder.build(run.model, 0), run.train), run.train)
    before = [one.shape for one in other.vectors()]
    assert before
    assert [one.shape for one in other.vectors()] == before
