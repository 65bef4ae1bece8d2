"""Forward passes at the weights that their backward passes are likely to find."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.comm.pipeline.activations import Entering
from decentral.core import config, jobs
from decentral.engine import memory
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.look_ahead import FOLLOWS, MOST_AHEAD, LookAhead

MakeSetup = Callable[..., ComputeSetup]


@pytest.fixture
def first_stage(setup_of: MakeSetup) -> Compute:
    return stage_of(setup_of("A"))


def stage_of(setup: ComputeSetup, span: tuple[int, int] = (0, 2)) -> Compute:
    """With `routes.overlap`; by default of the embedding and the first block."""
    routes = config.RoutesConfig(wire="fp32", overlap=True)
    run = setup.config.model_copy(update={"routes": routes})
    return Compute(dataclasses.replace(setup, config=run, span=span))


def look_ahead(compute: Compute) -> LookAhead:
    assert compute.span.stages.ahead is not None
    return compute.span.stages.ahead


def weights(compute: Compute, last: int = 2) -> list[Tensor]:
    """Of a micro-batch through layers [0, last)."""
    return list(look_ahead(compute).weights(0, last).vectors.values())


def begin(compute: Compute, local_id: int, last: int = 2) -> jobs.ForwardDone:
    done = compute.do(jobs.Draw(local_id, last))
    assert isinstance(done, jobs.ForwardDone)
    return done


def end(compute: Compute, done: jobs.ForwardDone) -> None:
    """The gradient of every hidden value is one; a step is taken with it."""
    (section, _), stages = done.layout, compute.span.stages
    blob = torch.ones(section.elements).numpy().tobytes()
    assert isinstance(compute.do(jobs.Backward(done.local_id, (section,), blob)), jobs.BackwardDone)
    stages.seal(0)
    assert stages.apply(0, 0)


def thetas(compute: Compute) -> list[Tensor]:
    return [live.theta.clone() for live in compute.span.inner.lives]


def test_gradients_that_are_not_late_are_computed_with_the_present_weights(first_stage: Compute) -> None:
    for local_id in range(3):
        end(first_stage, begin(first_stage, local_id))
    assert look_ahead(first_stage).lateness == [0.0, 0.0]
    for theta, ahead in zip(thetas(first_stage), weights(first_stage), strict=True):
        assert torch.equal(theta, ahead)


def test_as_many_steps_are_looked_ahead_as_passed_between_the_passes(first_stage: Compute) -> None:
    under_way, before = [begin(first_stage, local_id) for local_id in range(3)], thetas(first_stage)
    for local_id in range(3, 60):
        under_way.append(begin(first_stage, local_id))
        before = thetas(first_stage)
        end(first_stage, under_way.pop(0))
    lateness = look_ahead(first_stage).lateness[0]
    assert look_ahead(first_stage).lateness == pytest.approx([3.0, 3.0], abs=3 * (1 - FOLLOWS) ** 50)
    for theta, old, ahead in zip(thetas(first_stage), before, weights(first_stage), strict=True):
        torch.testing.assert_close(ahead, theta + lateness * (theta - old), atol=1e-6, rtol=1e-5)


def test_a_step_is_repeated_a_few_times_at_most(first_stage: Compute) -> None:
    end(first_stage, begin(first_stage, 0))
    ahead = look_ahead(first_stage)
    ahead.lateness = [MOST_AHEAD] * 2
    most = weights(first_stage)
    ahead.lateness = [1e9] * 2
    assert all(torch.equal(one, other) for one, other in zip(most, weights(first_stage), strict=True))


def test_a_micro_batch_that_took_for_ever_says_no_more_than_one_that_was_late(first_stage: Compute) -> None:
    """Else one peer that holds a gradient back for an hour decides how far all others are computed ahead."""
    held, ahead = begin(first_stage, 0), look_ahead(first_stage)
    ahead.steps = [3600] * 2
    end(first_stage, held)
    assert ahead.lateness == [FOLLOWS * MOST_AHEAD] * 2


def test_a_step_without_a_gradient_for_a_fragment_is_none_of_its(first_stage: Compute) -> None:
    """A micro-batch through the embedding alone leaves what the block's last step moved, and its lateness."""
    end(first_stage, begin(first_stage, 0))
    look_ahead(first_stage).lateness = [1.0, 1.0]
    block = weights(first_stage)[1]
    end(first_stage, begin(first_stage, 1, last=1))
    assert look_ahead(first_stage).steps == [2, 1]
    assert torch.equal(weights(first_stage)[1], block)


def test_a_backward_pass_runs_at_the_weights_of_its_forward_pass(setup_of: MakeSetup) -> None:
    """What is computed while other weights are there is as if they were not."""
    found = list[list[Tensor]]()
    for moved in (0.0, 1.0):
        compute = stage_of(setup_of("A"), (1, 2))
        hidden_BTD, targets_BT = torch.linspace(-1, 1, 2 * 16 * 32).view(2, 16, 32), torch.ones(2, 16).long()
        entering = compute.span.activations.pack(1, Entering(hidden_BTD, targets_BT))
        done = compute.do(jobs.Forward(1, 1, 2, 2, *entering))
        assert isinstance(done, jobs.ForwardDone)
        for live in compute.span.inner.lives:
            live.theta += moved
        (section, _) = done.layout
        compute.do(jobs.Backward(done.local_id, (section,), torch.ones(section.elements).numpy().tobytes()))
        found.append(compute.span.stages.sums.filled)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert any(bool(one.any()) for one in found[0])


@pytest.mark.parametrize("last", [1, 2])
def test_what_a_span_needs_has_room_for_the_weights_of_each_micro_batch_under_way(
    first_stage: Compute, last: int
) -> None:
    """One that passes a part of the span is charged for that part, and keeps no more."""
    run, stages = first_stage.span.run, first_stage.span.stages
    kept = 0
    for local_id in range(3):
        begin(first_stage, local_id, last)
        ahead = stages.pending[local_id].ahead
        assert ahead is not None
        kept += sum(one.nbytes for one in ahead.vectors.values())
    present = run.model_copy(update={"routes": config.RoutesConfig(overlap=False)})
    passed = [index for index, one in enumerate(first_stage.fragments) if one.last <= last]
    apart = [memory.needs(one).activations for one in (run, present)]
    assert kept == 3 * sum(apart[0][index] - apart[1][index] for index in passed)


def test_without_overlap_nothing_is_kept(setup_of: MakeSetup) -> None:
    compute = Compute(dataclasses.replace(setup_of("A"), span=(0, 2)))
    assert compute.span.stages.ahead is None
