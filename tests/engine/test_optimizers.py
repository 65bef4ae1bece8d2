"""The optimizers of a fragment's stretches: which parameters each trains, against torch's own, and their state."""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Packer, unpack
from decentral.comm.gossip.outer_kernels import TorchKernels
from decentral.comm.gossip.update_rules import PartnerWindow, RuleTools
from decentral.comm.rounds.synchronous_rule import SynchronousRule
from decentral.core import config, jobs
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.engine import heap, inner, muon
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.fragment import Live, fragments
from decentral.engine.inner import Inner
from decentral.engine.muon import batched_step, muon_step
from decentral.engine.optimizers import round_stochastically
from decentral.engine.step import Chain, Device, train_step
from decentral.model import decoder

MODEL = config.ModelConfig(depth=2, width=32, context=16)
CPU = Device(torch.device("cpu"), torch.float32)
MUON = config.TrainConfig(optimizer="muon", learning_rate=1e-2, warmup_steps=0, clip_norm=1e9)
ADAMW = MUON.model_copy(update={"optimizer": "adamw"})
MakeSetup = Callable[..., ComputeSetup]


def trained_by(layers: Sequence[nn.Module], train: config.TrainConfig, at_least: int = 1000) -> Inner:
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    return Inner([Live(fragment, layers, CPU.device, train) for fragment in fragments(sizes, at_least)], train)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def losses(train: config.TrainConfig, steps: int) -> list[float]:
    """Of a model that sees the same micro-batch again and again."""
    layers = decoder.build(MODEL, 0)
    inner = trained_by(layers, train)
    return [train_step(Chain(layers), [batch(0)], inner, step, train, CPU).loss for step in range(steps)]


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The tensors that are computed within it; it holds them, so that no two have one address but by sharing it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        self.tensors += [one for one in (made if isinstance(made, tuple | list) else [made]) if torch.is_tensor(one)]
        return made


# Muon


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_a_step_of_muon_is_torchs_but_for_the_rounding_of_its_products(shape: tuple[int, int]) -> None:
    chance = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(shape, generator=chance), torch.randn(shape, generator=chance)
    ours, momentum, theirs = start.clone(), torch.zeros(shape), start.clone()
    torchs = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    theirs.grad = gradient.clone()
    torchs.step()  # type: ignore[no-untyped-call]
    muon_step([ours], [gradient], [momentum], 0.1, 0.1)
    assert torch.equal(momentum, torchs.state[theirs]["momentum_buffer"])
    assert torch.linalg.vector_norm(ours - theirs) < 0.02 * torch.linalg.vector_norm(theirs - start)


@pytest.mark.parametrize("has_units", [False, True])
def test_muon_on_the_cpu_allocates_no_matrices_after_its_first_step(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide, tall and square matrices; memory for new ones took a tenth of a step of 85 M parameters."""
    monkeypatch.setattr(muon, "cpu_multiplies_bf16", lambda: has_units)
    shapes = [(256, 300), (300, 256), (256, 256)]
    matrices, gradients, momenta = ([torch.ones(shape) for shape in shapes] for _ in range(3))
    muon_step(matrices, gradients, momenta, 0.1, 0.1)
    with Seen() as first:
        muon_step(matrices, gradients, momenta, 0.1, 0.1)
    with Seen() as second:
        muon_step(matrices, gradients, momenta, 0.1, 0.1)
    matrices_of_first, matrices_of_second = (
        {one.data_ptr() for one in seen.tensors if one.ndim == 2} for seen in (first, second)
    )
    assert matrices_of_second == matrices_of_first


def test_muon_in_batches_takes_the_steps_of_torchs_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide, tall and square matrices, in batches of at most two of the wide ones."""
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 2 * 8 * 32)
    shapes = [(8, 32), (32, 8), (16, 16), (8, 32), (8, 32), (64, 64)]
    chance = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=chance) for shape in shapes]
    theirs, ours = ([one.clone() for one in start] for _ in range(2))
    momenta = [torch.zeros(shape) for shape in shapes]
    torchs = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        gradients = [torch.randn(shape, generator=chance) for shape in shapes]
        for one, gradient in zip(theirs, gradients, strict=True):
            one.grad = gradient.clone()
        torchs.step()  # type: ignore[no-untyped-call]
        batched_step(ours, gradients, momenta, 0.1, 0.1)
    for mine, their, momentum, before in zip(ours, theirs, momenta, start, strict=True):
        assert torch.equal(momentum, torchs.state[their]["momentum_buffer"])
        assert torch.linalg.vector_norm(mine - their) < 0.02 * torch.linalg.vector_norm(their - before)


def test_a_void_step_of_muon_in_batches_changes_nothing() -> None:
    chance = torch.Generator().manual_seed(0)
    matrices, momenta = ([torch.randn(shape, generator=chance) for shape in ((8, 32), (32, 8))] for _ in range(2))
    before = [one.clone() for one in (*matrices, *momenta)]
    batched_step(matrices, [torch.full_like(one, torch.nan) for one in matrices], momenta, 0.1, 0.1, torch.ones(()))
    assert all(map(torch.equal, (*matrices, *momenta), before))


def test_the_first_step_of_muon_loads_no_compiler() -> None:
    code = """import sys, torch
from decentral.engine.muon import muon_step
muon_step([torch.ones(8, 4)], [torch.ones(8, 4)], [torch.zeros(8, 4)], 0.1, 0.1)
print("torch._dynamo" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


@pytest.mark.parametrize(
    ("side", "has_units", "dtypes"),
    [
        (8, True, {torch.float32}),
        (256, False, {torch.float32}),
        (256, True, {torch.float32, torch.bfloat16}),
    ],
)
def test_on_the_cpu_the_products_of_muon_are_in_bf16_where_that_is_faster(
    side: int, has_units: bool, dtypes: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "cpu_multiplies_bf16", lambda: has_units)
    with Seen() as seen:
        muon_step([torch.randn(side, side)], [torch.randn(side, side)], [torch.zeros(side, side)], 0.1, 0.1)
    assert {one.dtype for one in seen.tensors} == dtypes


def test_muon_trains_the_matrices_of_the_blocks_and_adamw_all_else() -> None:
    by_muon, by_adamw, before = decoder.build(MODEL, 0), decoder.build(MODEL, 0), decoder.build(MODEL, 0)
    for layers, train in ((by_muon, MUON), (by_adamw, ADAMW)):
        train_step(Chain(layers), [batch(0)], trained_by(layers, train), 0, train, CPU)
    rows = zip(*(nn.ModuleList(one).named_parameters() for one in (by_muon, by_adamw, before)), strict=True)
    for (name, ours), (_, plain), (_, old) in rows:
        layer = int(name.split(".")[0])
        if layer in (0, MODEL.depth + 1) or ours.ndim < 2:
            assert torch.equal(ours, plain), name
            continue
        step = (ours - old * (1 - 1e-2 * MUON.weight_decay)) / (1e-2 * 0.2 * max(old.shape) ** 0.5)
        lengths = torch.linalg.svdvals(step)
        assert lengths.median() > 0.6, name
        assert lengths.max() < 1.4, name


def test_in_a_users_own_model_the_first_and_last_layer_are_adamws() -> None:
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.Linear(8, 6), nn.Conv1d(2, 3, 2), nn.Linear(6, 8)]
    live = trained_by(layers, MUON, at_least=10**6).lives[0]
    total = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    assert live.state.exp_avg.numel() == total
    assert live.state.exp_avg_sq.numel() == total - 8 * 6  # only that matrix has no second moment
    assert torch.equal(live.theta[: 8 * 6].view(6, 8), next(layers[1].parameters()))


def test_a_part_of_the_model_has_the_same_stretches_as_the_whole() -> None:
    layers, part = decoder.build(MODEL, 0), decoder.build(MODEL, 0, 2, 4)
    whole = trained_by(layers, MUON, at_least=1)
    for live in whole.lives[2:]:
        alone = Live(live.fragment, part, CPU.device, MUON, range(2, 4))
        assert torch.equal(alone.theta, live.theta)
        assert [type(one) for one in alone.state.stretches] == [type(one) for one in live.state.stretches]


def test_muon_learns_a_micro_batch_by_heart() -> None:
    found = losses(MUON, 20)
    assert found[-1] < found[0] - 4


def test_a_peer_with_muon_resumes_bit_for_bit(setup_of: MakeSetup) -> None:
    setup = with_train(setup_of(), optimizer="muon")
    first = Compute(setup)
    first.step()
    first.do(jobs.Save())
    losses = [first.step().loss for _ in range(2)]
    second = Compute(setup)
    assert second.resume()
    assert [second.step().loss for _ in range(2)] == losses


def test_a_checkpoint_of_the_other_optimizer_is_a_user_error(setup_of: MakeSetup) -> None:
    setup = setup_of()
    Compute(setup).do(jobs.Save())
    with pytest.raises(UserError, match="has a checkpoint of another run"):
        Compute(with_train(setup, optimizer="adamw")).resume()


@pytest.mark.parametrize("train", [MUON, ADAMW], ids=["muon", "adamw"])
def test_a_newcomer_to_synchronous_training_takes_the_next_step_to_the_bit(train: config.TrainConfig) -> None:
    tools = RuleTools(blockwise, TorchKernels(blockwise))
    donor, newcomer = (trained_by(decoder.build(MODEL, seed), train, 10**6).lives[0] for seed in (0, 1))
    gradient = torch.randn(donor.theta.numel(), generator=torch.Generator().manual_seed(0))
    rule = SynchronousRule(config.GossipConfig(algorithm="synchronous"), donor.theta, PeerId("A"), tools)
    sums = [PartnerWindow(PeerId("A"), 1, {"gradient": gradient})]
    rule.advance(donor, sums)
    packer = Packer(blockwise)
    rule.donate(donor, packer)
    rule.adopt(newcomer, unpack(blockwise, *packer.finish()))
    for live in (donor, newcomer):
        rule.advance(live, sums)
    for name, tensor in donor.tensors().items():
        assert torch.equal(newcomer.tensors()[name], tensor), name


# bf16 weights


def test_rounding_keeps_the_mean_of_changes_that_bf16_cannot_hold() -> None:
    chance, values = torch.Generator().manual_seed(0), torch.full((100_000,), 1 + 2**-10)
    rounded = torch.empty(100_000, dtype=torch.bfloat16)
    round_stochastically(values, rounded, chance)
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert float(rounded.float().mean()) == pytest.approx(1 + 2**-10, abs=1e-4)


@pytest.mark.parametrize("value", [0.0, -1.5, 3.0e38, float("inf")])
def test_rounding_leaves_what_bf16_can_hold(value: float) -> None:
    values = torch.full((100,), value).bfloat16().float()
    rounded = torch.empty(100, dtype=torch.bfloat16)
    round_stochastically(values, rounded, torch.Generator())
    assert torch.equal(rounded.float(), values)


@pytest.mark.parametrize(("train", "passes_s", "returned"), [(MUON, 1.0, 2), (MUON, 3.0, 0), (ADAMW, 1.0, 0)])
def test_a_large_model_returns_the_memory_of_passes_that_are_shorter_than_muons_step(
    train: config.TrainConfig, passes_s: float, returned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = [0.0], []
    monkeypatch.setattr(inner, "AT_ONCE_ELEMENTS", 0)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(heap, "return_free_pages", lambda: calls.append(now[0]))
    taken = trained_by(decoder.build(MODEL, 0), train)
    monkeypatch.setattr(inner, "step_fragments", lambda *args: now.__setitem__(0, now[0] + 2.0 / len(taken.lives)))
    for _ in range(3):
        now[0] += passes_s
        taken.step_all(1e-3, tokens=1)
    assert len(calls) == returned  # and before the first step it is not known how long steps take


def test_bf16_weights_learn_as_fp32_weights_do() -> None:
    wide, narrow = (losses(ADAMW.model_copy(update={"weights": name}), 30) for name in ("float32", "bfloat16"))
    assert narrow[-1] == pytest.approx(wide[-1], abs=0.1)
    assert wide[-1] < wide[0] - 2


def test_gossip_adds_to_bf16_weights_without_loss_in_the_mean() -> None:
    layers = decoder.build(MODEL, 0)
    live = trained_by(layers, ADAMW.model_copy(update={"weights": "bfloat16"}), 10**6).lives[0]
    live.theta.fill_(1.0)
    live.add(torch.full((live.theta.numel(),), 2**-10))
    copied = torch.empty(live.theta.numel())
    live.copy_theta(copied)
    assert float(copied.mean()) == pytest.approx(1 + 2**-10, abs=2e-4)
    assert torch.equal(next(layers[0].parameters()).flatten(), live.theta[: 256 * 32])


# Moments in int8


def test_moments_in_int8_train_as_those_in_fp32_do() -> None:
    pytest.importorskip("bitsandbytes", reason="the extra 8bit is not installed")
    wide, narrow = (losses(ADAMW.model_copy(update={"moments": name}), 30) for name in ("float32", "int8"))
    assert narrow[0] == wide[0]
    assert narrow[-1] == pytest.approx(wide[-1], abs=0.1)


def test_a_peer_with_moments_in_int8_resumes_bit_for_bit(setup_of: MakeSetup) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra 8bit is not installed")
    setup = with_train(setup_of(), moments="int8")
    first = Compute(setup)
    first.step()
    first.do(jobs.Save())
    second = Compute(setup)
    assert second.resume()
    assert second.step().loss == first.step().loss


def test_without_bitsandbytes_moments_in_int8_are_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(UserError, match=r"train.moments: int8 needs bitsandbytes .*; install decentral\[8bit\]"):
        trained_by(decoder.build(MODEL, 0), ADAMW.model_copy(update={"moments": "int8"}))


def with_train(setup: ComputeSetup, **changes: object) -> ComputeSetup:
    run = setup.config
    return dataclasses.replace(setup, config=run.model_copy(update={"train": run.train.model_copy(update=changes)}))
