"""A peer that expects a state draws initial weights only where nobody gives it any."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decentral.core import config, jobs
from decentral.engine import checkpoint, measure
from decentral.engine.compute import Compute, ComputeSetup
from decentral.model import decoder

MakeSetup = Callable[..., ComputeSetup]


def weights(compute: Compute) -> list[Tensor]:
    return [live.theta.clone() for live in compute.span.inner.lives]


def expectant(setup: ComputeSetup) -> Compute:
    """A peer whose weights hold no number yet."""
    compute = Compute(replace(setup, state_expected=True))
    for live in compute.span.inner.lives:
        live.theta.fill_(float("nan"))
    return compute


def states(compute: Compute) -> list[jobs.Donated]:
    exported = [compute.do(jobs.ExportState(fragment.index)) for fragment in compute.fragments]
    return [(one.fragment, one.layout, one.blob) for one in exported if isinstance(one, jobs.StateExported)]


def test_a_peer_that_is_given_nothing_starts_with_the_seeds_weights(setup_of: MakeSetup) -> None:
    usual, compute = Compute(setup_of()), expectant(setup_of())
    compute.do(jobs.Start(False))
    assert all(map(torch.equal, weights(compute), weights(usual)))
    assert states(compute) == states(usual)


def test_what_donors_gave_stays_and_the_rest_is_drawn(setup_of: MakeSetup) -> None:
    donor, compute = Compute(setup_of()), expectant(setup_of())
    donor.step()
    donor.do(jobs.CloseWindow(0, 1))
    donor.do(jobs.Merge(0, 1, ()))
    given = states(donor)[0]
    assert compute.do(jobs.ImportState((given,), 1)) == jobs.StateImported(True)
    compute.do(jobs.Start(False))
    assert states(compute)[0] == given
    assert all(map(torch.equal, weights(compute)[1:], weights(Compute(setup_of()))[1:]))


def test_a_peer_that_stops_before_it_has_joined_saves_the_seeds_weights(setup_of: MakeSetup) -> None:
    compute = expectant(setup_of())
    compute.do(jobs.Save())
    found = checkpoint.read(compute.setup.folder)
    assert found is not None
    assert torch.equal(found[0]["0.theta"], weights(Compute(setup_of()))[0])


def test_a_checkpoint_is_not_drawn_over(setup_of: MakeSetup) -> None:
    before = Compute(setup_of())
    before.step()
    before.do(jobs.Save())
    again = expectant(before.setup)
    assert again.resume()
    again.do(jobs.Start(False))
    assert all(map(torch.equal, weights(again), weights(before)))


def test_memory_that_was_touched_while_a_newcomer_waited_changes_nothing(setup_of: MakeSetup) -> None:
    donor, first, second = Compute(setup_of()), expectant(setup_of()), expectant(setup_of())
    first.span.map_memory()
    for newcomer in (first, second):
        assert newcomer.do(jobs.ImportState(tuple(states(donor)), 1)) == jobs.StateImported(True)
        newcomer.do(jobs.Start(True))
        newcomer.step()
    assert all(map(torch.equal, weights(first), weights(second)))


def test_weights_that_are_there_are_not_touched(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of())
    before = weights(compute)
    compute.span.map_memory()
    assert all(map(torch.equal, weights(compute), before))


def test_a_peer_with_a_checkpoint_awaits_no_state(setup_of: MakeSetup) -> None:
    before = expectant(setup_of())
    assert before.awaits_state
    before.do(jobs.Start(False))
    before.do(jobs.Save())
    again = expectant(before.setup)
    again.resume()
    assert not again.awaits_state


def test_layers_without_weights_are_built_like_the_others() -> None:
    model = config.ModelConfig(depth=2)
    undrawn = decoder.build(model, 0, drawn=False)
    for one, other in zip(undrawn, decoder.build(model, 0), strict=True):
        assert {n: p.shape for n, p in one.named_parameters()} == {n: p.shape for n, p in other.named_parameters()}
        assert all(map(torch.equal, one.buffers(), other.buffers()))


class SlowLayers:
    """A Forward that takes so long by the clock of a test."""

    def __init__(self, clock: list[float], pass_s: float) -> None:
        self.clock, self.pass_s, self.passes = clock, pass_s, 0
        self.weight = torch.zeros(256, requires_grad=True)

    def __call__(self, tokens_BT: Tensor, /) -> Tensor:
        raise AssertionError("training asks for the loss")

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, /) -> Tensor:
        self.passes += 1
        self.clock[0] += self.pass_s
        return self.weight[targets_BT].sum()


@pytest.mark.parametrize(("pass_s", "passes"), [(0.01, 3), (0.3, 2), (2.0, 1)])
def test_a_long_pass_is_not_measured_three_times(monkeypatch: pytest.MonkeyPatch, pass_s: float, passes: int) -> None:
    clock, model = [0.0], config.ModelConfig(depth=1, context=4)
    device, layers = measure.choose("cpu"), SlowLayers(clock, pass_s)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(measure, "_flops", lambda device: 1.0)
    found = measure.measure(layers, model, device, micro_batch=1)
    assert layers.passes == passes
    assert found.tokens_per_s == pytest.approx(4 / pass_s)
