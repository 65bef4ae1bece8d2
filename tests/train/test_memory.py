"""The model of a device's memory, compared with what torch really keeps."""

import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decentral.algorithms.pull import PullRule
from decentral.comm.gossip.snapshots import SNAPSHOTS_KEPT
from decentral.core import config, jobs, memory_needs
from decentral.core.errors import UserError
from decentral.core.jobs import MOST_UNDER_WAY
from decentral.train import gpt, memory
from decentral.train.compute import Compute, ComputeSetup


def really_kept(model: config.ModelConfig, layer: int) -> float:
    """Bytes a token that autograd keeps for this layer, parameters and buffers left out."""
    layers = gpt.build(model, 0)
    fixed = {t.untyped_storage().data_ptr() for one in layers for t in [*one.parameters(), *one.buffers()]}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens_BT = torch.zeros(2, model.context, dtype=torch.int64)
    hidden_BTD = torch.randn(2, model.context, model.d_model, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layers[layer](tokens_BT if layer == 0 else hidden_BTD)
        if layer == len(layers) - 1:
            out = gpt.loss_of(out, tokens_BT)
    seen[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    return sum(seen.values()) / tokens_BT.numel()


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("layer", [1, -1])
def test_a_layer_keeps_about_what_the_model_says(width: int, layer: int) -> None:
    model = config.ModelConfig(depth=1, width=width, context=64)
    said = memory.activation_bytes(model)[layer]
    kept = really_kept(model, layer % 3)
    passing = 2 * 4 * model.vocabulary if layer == -1 else 0  # logits and their gradient, while the loss is taken
    assert 0.8 * kept <= said <= 1.3 * (kept + passing)


def test_the_state_of_a_parameter_is_what_the_tensors_take(setup_of: Callable[..., ComputeSetup]) -> None:
    """The model allows for an outer momentum, which this run does not have: 4 bytes for a parameter less."""
    setup = setup_of("A")
    compute = Compute(dataclasses.replace(setup, span=(1, 3)))
    parameters = sum(fragment.parameters for fragment in compute.fragments)
    sums = compute.span.stages.sums
    held: list[torch.Tensor] = [tensor for slot in sums.sealed for tensor in slot]
    published = 0
    for gossiped in compute.gossip.fragments:
        closed = compute.do(jobs.CloseWindow(gossiped.index, 1))
        assert isinstance(closed, jobs.WindowClosed)
        published += len(closed.blob) + sum(section.size for section in closed.on_request)
        rule = gossiped.rule
        assert isinstance(rule, PullRule)
        held += [*gossiped.live.tensors().values(), gossiped.live.grad]
        held += [rule.phi, rule.baseline, rule.residual, rule.spare]
    taken = sum(tensor.nbytes for tensor in held) + SNAPSHOTS_KEPT * published
    needs = memory.needs(setup.config)
    said = sum(needs.state[1:3]) + sum(needs.sums[1:3])
    assert 0.95 * said <= taken + 4 * parameters <= said


def test_a_span_grows_as_far_as_the_memory_goes() -> None:
    needs = memory.needs(config.Config(model=config.ModelConfig(depth=4, width=128)))
    count = len(needs.fragments)
    assert memory_needs.widest_span(needs, needs.span_bytes(0, count))(0) == count
    assert memory_needs.widest_span(needs, needs.span_bytes(0, count) - 1)(0) == count - 1
    assert memory_needs.widest_span(needs, 1)(2) == 2


def test_a_memory_too_small_for_one_layer_is_a_user_error() -> None:
    needs = memory.needs(config.Config(model=config.ModelConfig(depth=4, width=128)))
    with pytest.raises(UserError, match=r"--memory 1000: the smallest part of this model takes \d+ bytes"):
        memory.check(needs, 1000)


def test_room_for_more_micro_batches_is_used_up_to_a_limit() -> None:
    needs = memory.needs(config.Config(model=config.ModelConfig(depth=4, width=128)))
    assert needs.capacity(0, 2, needs.span_bytes(0, 2)) == memory_needs.LEAST_IN_FLIGHT
    assert needs.capacity(0, 2, 1 << 50) == MOST_UNDER_WAY


def test_a_freed_tensor_goes_back_to_the_machine() -> None:
    memory.give_back_what_is_freed()
    before = resident()
    for size in (4, 8, 12, 16):  # each that is freed would raise glibc's threshold above the next
        torch.ones(size << 18)
    held = [torch.ones(12 << 18) for _ in range(8)]
    del held
    assert resident() < before + (4 << 20)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_narrower_a_span_the_more_micro_batches_it_needs_memory_for() -> None:
    """The first of P stages holds P micro-batches while they are on their way."""
    found = memory.needs(
        config.Config(model=config.ModelConfig(depth=16), gossip=config.GossipConfig(fragment_parameters=1))
    )
    count = len(found.fragments)
    widths = (count, count // 2, count // 6, 1)
    assert [found.required_in_flight(width) for width in widths] == [4, 4, 8, count + 2]
    assert [found.wanted_in_flight(0, width) for width in widths] == [4, 4, 30, MOST_UNDER_WAY]
    assert [found.wanted_in_flight(count - 3, count), found.wanted_in_flight(count - 1, count)] == [8, 20]


def test_a_span_is_as_wide_as_its_wanted_micro_batches_allow_or_else_its_required_ones() -> None:
    found = memory.needs(
        config.Config(model=config.ModelConfig(depth=16), gossip=config.GossipConfig(fragment_parameters=1))
    )
    enough = found.span_bytes(3, 6, found.wanted_in_flight(3, 6))
    assert memory_needs.widest_span(found, enough)(3) >= 6
    assert found.span_bytes(3, 5) < found.span_bytes(3, 5, found.wanted_in_flight(3, 5))
    assert memory_needs.widest_span(found, found.span_bytes(3, 4))(3) == 4  # less than is wanted, all that is required
    assert memory_needs.widest_span(found, found.span_bytes(3, 4) - 1)(3) == 3
