"""Tests on a real GPU. They are skipped, with the reason, where there is none."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.kernel_choice import best_kernels, prove
from decentral.comm.gossip.kernels_cpu import CompiledKernels
from decentral.comm.gossip.outer_kernels import OuterKernels, OuterVectors, Weighted
from decentral.core import jobs
from decentral.core.choices import OPTIMIZERS
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.fragment import copy_in
from decentral.engine.muon import muon_step
from decentral.engine.step import Device

pytestmark = pytest.mark.gpu

MakeSetup = Callable[..., ComputeSetup]


def held_out_loss(compute: Compute) -> float:
    evaluated = compute.do(jobs.Evaluate())
    assert isinstance(evaluated, jobs.Evaluated)
    return evaluated.loss


def after(compute: Compute, steps: int) -> float:
    for _ in range(steps):
        compute.step()
    return held_out_loss(compute)


def test_training_in_bf16_lowers_the_held_out_loss(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of(device="cuda", dtype=torch.bfloat16))
    before = held_out_loss(compute)
    assert after(compute, 40) < before - 1.0


def test_the_weights_stay_in_fp32_while_the_arithmetic_is_bf16(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of(device="cuda", dtype=torch.bfloat16))
    compute.step()
    assert {gossiped.live.theta.dtype for gossiped in compute.gossip.fragments} == {torch.float32}
    assert {gossiped.live.theta.device.type for gossiped in compute.gossip.fragments} == {"cuda"}


def test_compiled_training_runs_and_learns(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of(device="cuda", dtype=torch.bfloat16, compiled=True))
    before = held_out_loss(compute)
    assert after(compute, 40) < before - 1.0


@pytest.mark.parametrize("codec", blockwise.CODECS)
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e30])
def test_the_bytes_from_cuda_are_those_from_the_cpu(codec: str, scale: float) -> None:
    values = scale * torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    assert blockwise.encode(codec, values.cuda()) == blockwise.encode(codec, values)


@pytest.mark.parametrize("codec", ["q4", "int8"])
def test_the_bytes_are_the_same_where_the_scale_is_a_bf16_number_exactly(codec: str) -> None:
    """Division by a constant may round differently on CUDA, as a product with its reciprocal; this would show here."""
    levels = {"q4": 7, "int8": 127}[codec]
    values = torch.cat([torch.full((256,), float(levels * k)) for k in range(1, 257)])
    assert blockwise.encode(codec, values.cuda()) == blockwise.encode(codec, values)


def test_a_window_merges_between_a_cuda_and_a_cpu_peer(setup_of: MakeSetup) -> None:
    pair = Compute(setup_of("A", "cuda", torch.bfloat16)), Compute(setup_of("B"))
    published = []
    for compute in pair:
        compute.step()
        closed = compute.do(jobs.CloseWindow(0, 1))
        assert isinstance(closed, jobs.WindowClosed)
        published.append(jobs.Contribution(compute.setup.peer, closed.tokens, closed.layout, closed.blob))
    for compute, contribution in zip(pair, reversed(published), strict=True):
        merged = compute.do(jobs.Merge(0, 1, (contribution,)))
        assert isinstance(merged, jobs.Merged)
        assert merged.used == (contribution.peer,)


def test_a_checkpoint_from_cuda_resumes_on_the_cpu(setup_of: MakeSetup) -> None:
    setup = setup_of(device="cuda", dtype=torch.bfloat16)
    on_cuda = Compute(setup)
    loss = after(on_cuda, 10)
    on_cuda.do(jobs.Save())
    on_cpu = Compute(replace(setup, device=Device(torch.device("cpu"), torch.float32)))
    assert on_cpu.resume()
    for ours, theirs in zip(on_cpu.gossip.fragments, on_cuda.gossip.fragments, strict=True):
        assert torch.equal(ours.live.theta, theirs.live.theta.cpu())
    assert held_out_loss(on_cpu) == pytest.approx(loss, abs=0.05)
    assert on_cpu.step().step == 11


def test_a_throttled_peer_waits_for_the_device(setup_of: MakeSetup) -> None:
    setup = setup_of(device="cuda")
    slow = Compute(replace(setup, device=replace(setup.device, emulated_s=0.01)))
    assert slow.step().spent.training >= 0.01


def test_a_correction_stays_as_it_is_until_the_device_has_added_it() -> None:
    """The training thread is ahead of its device, and the worker copies the next correction in meanwhile."""
    device, n = torch.device("cuda", torch.cuda.current_device()), 1 << 20
    theta = torch.zeros(n, device=device)
    first, second = torch.ones(n).pin_memory(), torch.full((n,), 2.0).pin_memory()
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 28)  # type: ignore[no-untyped-call]
    vector = copy_in(first, device)
    theta.add_(vector)
    del vector
    other = copy_in(second, device)
    torch.cuda.synchronize()
    assert torch.equal(theta, torch.ones_like(theta))
    assert torch.equal(other, second.to(device))


@pytest.fixture
def kernels() -> OuterKernels:
    pytest.importorskip("cupy", reason="needs cupy: install the extra `cuda`")
    from decentral.comm.gossip.kernels_cuda import CudaKernels

    return CudaKernels(torch.device("cuda"), chunk_elements=1024)


def pinned(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).pin_memory()


def test_the_kernels_of_this_gpu_prove_themselves(kernels: OuterKernels) -> None:
    prove(kernels)


def test_a_peer_with_a_gpu_and_cupy_gets_cuda_kernels(kernels: OuterKernels) -> None:
    chosen, reason = best_kernels(torch.device("cuda"), blockwise)
    assert type(chosen) is type(kernels)
    assert reason == "CUDA, proven against torch"


@pytest.mark.parametrize("code", ["q4", *blockwise.SHORTER_CODECS])
def test_a_snapshot_on_the_device_closes_as_one_in_host_memory(kernels: OuterKernels, code: str) -> None:
    """Its values are written in training's stream just before."""
    n, on_device = 10_001, torch.zeros(10_001, device="cuda")
    snapshot, baseline, residual = (pinned(n, seed) for seed in range(3))
    expected_residual = residual.clone()
    expected = CompiledKernels().close(snapshot, baseline, expected_residual, code)
    on_device.copy_(snapshot, non_blocking=True)
    blob, length = kernels.close(on_device, baseline, residual, code)
    assert blob == expected[0]
    assert length == pytest.approx(expected[1], rel=1e-9)
    assert torch.equal(residual, expected_residual)


def test_pinned_vectors_of_many_chunks_merge_as_on_the_cpu(kernels: OuterKernels) -> None:
    n = 100_001
    steps = [Weighted(0.5, blockwise.encode("q4", pinned(n, 10 + k))) for k in range(3)]
    towards = [Weighted(0.3, blockwise.encode("int8", pinned(n, 20 + k))) for k in range(2)]
    results = []
    for one in (kernels, CompiledKernels()):
        vectors = OuterVectors(pinned(n, 1), pinned(n, 2), pinned(n, 3))
        one.merge(vectors, steps, towards, rho=0.6)
        results.append(vectors)
    for name in ("phi", "baseline", "correction"):
        assert torch.equal(*(getattr(vectors, name) for vectors in results)), name


def test_muon_on_the_gpu_takes_the_steps_of_torchs_muon() -> None:
    chance = torch.Generator("cuda").manual_seed(0)
    shapes = [(64, 256), (256, 64), (64, 256), (128, 128)]
    start = [torch.randn(shape, generator=chance, device="cuda") for shape in shapes]
    gradients = [torch.randn(shape, generator=chance, device="cuda") for shape in shapes]
    ours, theirs = ([one.clone() for one in start] for _ in range(2))
    torchs = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for one, gradient in zip(theirs, gradients, strict=True):
        one.grad = gradient
    torchs.step()  # type: ignore[no-untyped-call]
    muon_step(ours, gradients, [torch.zeros_like(one) for one in start], 0.1, 0.1)
    for mine, their, before in zip(ours, theirs, start, strict=True):
        assert torch.linalg.vector_norm(mine - their) < 0.02 * torch.linalg.vector_norm(their - before)


def with_optimizer(setup: ComputeSetup, optimizer: str) -> ComputeSetup:
    train = setup.config.train.model_copy(update={"optimizer": optimizer})
    return replace(setup, config=setup.config.model_copy(update={"train": train}))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_whose_loss_is_read_one_step_later_are_those_that_are_read_at_once(
    setup_of: MakeSetup, optimizer: str
) -> None:
    at_once, ahead = (Compute(with_optimizer(setup_of(device="cuda"), optimizer)) for _ in range(2))
    expected = [at_once.step() for _ in range(5)]
    found = [ahead.step_ahead() for _ in range(5)]
    assert [len(steps) for steps in found] == [0, 1, 1, 1, 1]
    losses = [step.loss for steps in (*found, ahead.read_queued()) for step in steps]
    assert losses == pytest.approx([step.loss for step in expected], rel=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_whose_gradient_is_not_finite_changes_no_weights_on_a_gpu(setup_of: MakeSetup, optimizer: str) -> None:
    compute = Compute(with_optimizer(setup_of(device="cuda"), optimizer))
    compute.step()
    lives = [gossiped.live for gossiped in compute.gossip.fragments]
    lives[-1].theta.fill_(1e30)
    before = [tensor.clone() for live in lives for tensor in live.tensors().values()]
    stepped = compute.step()
    assert (stepped.dropped, stepped.tokens) == (True, 0)
    after_it = [tensor for live in lives for tensor in live.tensors().values()]
    assert all(map(torch.equal, after_it, before))
