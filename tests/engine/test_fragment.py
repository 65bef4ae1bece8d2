"""The inner optimizer: torch's AdamW, on one flat vector per fragment."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from decentral.core import config
from decentral.core.choices import OPTIMIZERS
from decentral.engine import inner as inner_module
from decentral.engine.fragment import Live, fragments
from decentral.engine.inner import Inner, rate_at
from decentral.engine.optimizers import BETA1, BETA2
from decentral.engine.step import Chain, Device, train_step
from decentral.model import decoder

MODEL = config.ModelConfig(depth=1, width=32, context=16)
TRAIN = config.TrainConfig(optimizer="adamw", learning_rate=1e-2, warmup_steps=2)
CPU = Device(torch.device("cpu"), torch.float32)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, logits_BTV: Tensor) -> Tensor:
        return logits_BTV * self.factor


def counts(layers: Sequence[nn.Module]) -> list[int]:
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]


def flat(layers: Sequence[nn.Module], train: config.TrainConfig = TRAIN) -> Inner:
    return Inner([Live(fragment, layers, CPU.device, train) for fragment in fragments(counts(layers), 1000)], train)


def whole(inner: Inner) -> Tensor:
    return torch.cat([live.theta for live in inner.lives])


# AdamW


@pytest.mark.parametrize("weight_decay", [0.1, 5.0])
def test_flat_adamw_is_torchs_adamw_on_the_parameters(weight_decay: float) -> None:
    ours, theirs = decoder.build(MODEL, 0), nn.Sequential(*decoder.build(MODEL, 0))
    train = TRAIN.model_copy(update={"weight_decay": weight_decay})
    inner = flat(ours, train)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(BETA1, BETA2), eps=1e-8)
    for step in range(8):
        train_step(Chain(ours), [batch(step)], inner, step, train, CPU)
        adamw.zero_grad()
        inputs_BT, targets_BT = batch(step)
        decoder.loss_of(theirs(inputs_BT), targets_BT).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(theirs.parameters(), train.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = rate_at(train, step, step)
        adamw.step()
    for (name, our), their in zip(nn.Sequential(*ours).named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(our, their, atol=2e-6, rtol=1e-4), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_large_model_steps_fragment_by_fragment_to_the_same_bits_and_keeps_no_gradients(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TRAIN.model_copy(update={"optimizer": optimizer})
    at_once, in_turn = (decoder.build(MODEL, 0) for _ in range(2))
    for layers, limit in ((at_once, 1 << 24), (in_turn, 0)):
        monkeypatch.setattr(inner_module, "AT_ONCE_ELEMENTS", limit)
        inner = flat(layers, train)
        assert inner.at_once == (limit > 0)
        for step in range(3):
            train_step(Chain(layers), [batch(step)], inner, step, train, CPU)
        assert all(one.grad is None for layer in layers for one in layer.parameters())
    for one, other in zip(nn.Sequential(*at_once).parameters(), nn.Sequential(*in_turn).parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_layers_see_the_flat_vector_and_the_vector_sees_the_layers() -> None:
    layers = decoder.build(MODEL, 0)
    inner = flat(layers)
    for live in inner.lives:
        live.theta.fill_(0.25)
    assert all(bool((parameter == 0.25).all()) for layer in layers for parameter in layer.parameters())
    decoder.loss_of(Chain(layers)(batch(0)[0]), batch(0)[1]).backward()  # type: ignore[no-untyped-call]
    assert sum(float(live.grad.abs().sum()) for live in inner.lives) > 0


def test_gossip_copies_the_weights_out_and_adds_its_correction() -> None:
    live = flat(decoder.build(MODEL, 0)).lives[0]
    before = live.theta.clone()
    copied = torch.empty_like(before)
    live.copy_theta(copied)
    live.add(torch.full_like(before, 0.5))
    assert torch.equal(copied, before)
    assert torch.equal(live.theta, before + 0.5)


def test_flattening_keeps_every_weight() -> None:
    ours, reference = decoder.build(MODEL, 0), decoder.build(MODEL, 0)
    flat(ours)
    for our, their in zip(nn.Sequential(*ours).parameters(), nn.Sequential(*reference).parameters(), strict=True):
        assert torch.equal(our, their)


@pytest.mark.parametrize("clip_norm", [1.0, 0.25])
def test_the_whole_gradient_is_clipped_to_its_norm(clip_norm: float) -> None:
    inner = flat(decoder.build(MODEL, 0), TRAIN.model_copy(update={"clip_norm": clip_norm}))
    for live in inner.lives:
        live.grad.fill_(3.0)
    before = float(inner.clip())
    after = float(torch.linalg.vector_norm(torch.cat([live.grad for live in inner.lives])))
    assert before == pytest.approx(3.0 * whole(inner).numel() ** 0.5, rel=1e-5)
    assert after == pytest.approx(clip_norm, rel=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_a_step_has_the_same_bits_whether_gradients_are_collected_or_not(seed: int) -> None:
    """An island's ranks take the same steps, though only the first one collects gradients of routes."""
    ends = []
    for collected in (False, True):
        torch.manual_seed(seed)
        layers = [nn.Linear(61, 67), nn.Linear(67, 33)]
        inner = flat(layers)
        gradients = [live.grad for live in inner.lives if collected]
        for layer in layers:
            for parameter in layer.parameters():
                gradient = torch.randn(parameter.shape)
                if gradients:
                    assert parameter.grad is not None
                    parameter.grad.copy_(gradient)
                else:
                    parameter.grad = gradient
        norm = inner.clip()
        inner.step_all(1e-2, 1)
        ends.append(torch.cat([norm[None], whole(inner)]))
    assert torch.equal(*ends)


def test_a_small_gradient_is_not_clipped() -> None:
    inner = flat(decoder.build(MODEL, 0))
    inner.lives[0].grad[0] = 0.1
    inner.clip()
    assert float(inner.lives[0].grad[0]) == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_dropped_and_training_goes_on(bad: float) -> None:
    layers = decoder.build(MODEL, 0)
    inner, forward = flat(layers), Chain(layers)
    before = whole(inner).clone()
    spoilt = Chain([*layers, Times(bad)])
    report = train_step(spoilt, [batch(0)], inner, 0, TRAIN, CPU)
    assert torch.equal(whole(inner), before)
    assert (report.micro_batches, report.tokens) == (0, 0), "what is counted is in the weights"
    train_step(forward, [batch(0)], inner, 0, TRAIN, CPU)
    assert bool(torch.isfinite(whole(inner)).all())
    assert not torch.equal(whole(inner), before)


def test_micro_batches_that_accumulate_make_one_step_of_their_mean() -> None:
    one, other = decoder.build(MODEL, 0), decoder.build(MODEL, 0)
    twice = TRAIN.model_copy(update={"accumulate": 2})
    parts = [batch(0), batch(1)]
    joined = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    ours, theirs = flat(one, twice), flat(other)
    report = train_step(Chain(one), parts, ours, 5, twice, CPU)
    train_step(Chain(other), [joined], theirs, 5, TRAIN, CPU)
    assert (report.micro_batches, report.tokens) == (2, 128)
    for our, their in zip(ours.lives, theirs.lives, strict=True):
        assert torch.allclose(our.state.exp_avg, their.state.exp_avg, atol=1e-6)


# Cutting into fragments


def spans(sizes: Sequence[int], at_least: int) -> list[tuple[int, int]]:
    return [(fragment.first, fragment.last) for fragment in fragments(sizes, at_least)]


def test_large_layers_are_fragments_of_their_own() -> None:
    assert spans([100, 100, 100], 50) == [(0, 1), (1, 2), (2, 3)]


def test_small_layers_share_a_fragment_until_it_is_large_enough() -> None:
    assert spans([10, 20, 30, 40, 60], 50) == [(0, 3), (3, 5)]


def test_a_short_tail_joins_the_last_fragment() -> None:
    assert spans([100, 100, 10], 50) == [(0, 1), (1, 3)]


def test_a_model_smaller_than_a_fragment_is_one() -> None:
    assert spans([1, 2, 3], 1000) == [(0, 3)]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), at_least=st.integers(1, 80))
def test_fragments_cover_all_layers_in_order_and_are_large_enough(sizes: list[int], at_least: int) -> None:
    found = fragments(sizes, at_least)
    assert [fragment.index for fragment in found] == list(range(len(found)))
    assert found[0].first == 0
    assert found[-1].last == len(sizes)
    assert all(one.last == other.first for one, other in pairwise(found))
    for fragment in found:
        assert fragment.parameters == sum(sizes[fragment.first : fragment.last])
        assert fragment.parameters >= at_least or len(found) == 1


# Learning rate


def rates(train: config.TrainConfig, steps: range) -> list[float]:
    return [rate_at(train, step, step) for step in steps]


def test_the_rate_rises_through_the_warm_up_and_then_stays() -> None:
    train = config.TrainConfig(learning_rate=1.0, warmup_steps=4)
    assert rates(train, range(7)) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])


def test_without_a_warm_up_the_rate_is_whole_at_once() -> None:
    assert rate_at(config.TrainConfig(learning_rate=1.0, warmup_steps=0), 0, 0) == 1.0


def test_the_rate_falls_to_its_final_share_and_stays_there() -> None:
    train = config.TrainConfig(learning_rate=1.0, warmup_steps=0, total_steps=10)
    assert rates(train, range(0, 15, 5)) == pytest.approx([1.0, 0.55, 0.1])
    assert rate_at(train, 1000, 1000) == pytest.approx(0.1)


def test_a_newcomer_warms_up_by_itself() -> None:
    train = config.TrainConfig(learning_rate=1.0, warmup_steps=4)
    assert rate_at(train, 10_000, 0) == pytest.approx(0.2)
    assert rate_at(train, 10_000, 4) == pytest.approx(1.0)


@given(lr_step=st.integers(0, 10**6), own=st.integers(0, 10**6), total=st.none() | st.integers(1, 10**5))
def test_the_rate_is_never_above_the_one_that_was_asked_for_nor_zero(lr_step: int, own: int, total: int | None) -> None:
    train = config.TrainConfig(learning_rate=3e-3, warmup_steps=10, total_steps=total)
    assert 0 < rate_at(train, lr_step, own) <= 3e-3
