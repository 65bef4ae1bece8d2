"""Tests on a real GPU. They are skipped, with the reason, where there is none."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decentral.core import jobs
from decentral.train import compress
from decentral.train.compute import Compute, ComputeSetup
from decentral.train.step import Device

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


@pytest.mark.parametrize("codec", ["q4", "int8", "bf16", "fp32"])
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e30])
def test_the_bytes_from_cuda_are_those_from_the_cpu(codec: str, scale: float) -> None:
    values = scale * torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    assert compress.encode(codec, values.cuda()) == compress.encode(codec, values)


@pytest.mark.parametrize("codec", ["q4", "int8"])
def test_the_bytes_are_the_same_where_the_scale_is_a_bf16_number_exactly(codec: str) -> None:
    """Division by a constant may round differently on CUDA, as a product with its reciprocal; this would show here."""
    levels = {"q4": 7, "int8": 127}[codec]
    values = torch.cat([torch.full((256,), float(levels * k)) for k in range(1, 257)])
    assert compress.encode(codec, values.cuda()) == compress.encode(codec, values)


def test_a_window_merges_between_a_cuda_and_a_cpu_peer(setup_of: MakeSetup) -> None:
    pair = Compute(setup_of("A", "cuda", torch.bfloat16)), Compute(setup_of("B"))
    published = []
    for compute in pair:
        compute.step()
        closed = compute.do(jobs.CloseWindow(0, 1))
        assert isinstance(closed, jobs.WindowClosed)
        published.append(
            jobs.Contribution(compute.setup.peer, closed.tokens, closed.lr_sum, closed.layout, closed.blob)
        )
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
    assert slow.step().seconds >= 0.01
