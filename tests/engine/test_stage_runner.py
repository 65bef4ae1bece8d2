"""Routes on real layers: three peers with overlapping spans compute what one process computes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decentral.comm.codecs import blockwise
from decentral.comm.pipeline.activations import ActivationFormat
from decentral.core import config, jobs
from decentral.core.choices import OPTIMIZERS
from decentral.core.fragments import Layout, Section
from decentral.core.ids import PeerId
from decentral.core.jobs import UNLIKE
from decentral.engine import measure, stage_runner
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.fragment import Live
from decentral.engine.inner import step_clipped
from decentral.model import decoder
from decentral.scheduler.throughput import routing
from tests.comm.pipeline.route_world import World
from tests.journal_lines import audited

MakeSetup = Callable[..., ComputeSetup]
SPANS = {"A": (0, 3), "B": (1, 4), "C": (2, 5)}  # of embedding, three blocks, head


@pytest.fixture
def computes(setup_of: MakeSetup) -> dict[str, Compute]:
    return {name: Compute(with_span(setup_of(name), span)) for name, span in SPANS.items()}


def with_span(setup: ComputeSetup, span: tuple[int, int] | None, wire: str = "fp32", **train: object) -> ComputeSetup:
    run = setup.config
    changed = {
        "model": run.model.model_copy(update={"depth": 3}),
        "routes": config.RoutesConfig.model_validate({"wire": wire}),
        "train": run.train.model_copy(update={"clip_norm": 1e9, **train}),
    }
    return dataclasses.replace(setup, config=run.model_copy(update=changed), span=span)


def world_of(computes: dict[str, Compute], per_step: int) -> World:
    """The routing weights use every span, so micro-batches leave and enter spans in the middle."""
    first = next(iter(computes.values()))
    world = World(first.span.cuts)
    speed: dict[routing.Span, float] = {}
    for name, compute in computes.items():
        held = compute.fragments
        span = held[0].first, held[-1].last
        world.add(name, *span, seconds=0.1, device=compute, forms=compute.span.forms, per_step=per_step)
        speed[held[0].index, held[-1].index + 1] = 1.0
    for name, peer in world.peers.items():
        held = computes[name].fragments
        peer.routes.load.view.weights = routing.solve(first.span.cuts, speed, (held[0].index, held[-1].index + 1))
    return world


def batches(compute: Compute, count: int) -> list[tuple[Tensor, Tensor]]:
    return [compute.batch(number) for number in range(count)]


def carried(world: World, micro_batches: int) -> None:
    """The peer A begins exactly so many micro-batches, and all of them come back."""
    origin = world.peers[PeerId("A")].routes
    origin.own.quota = micro_batches
    world.start()
    world.run(5.0 + micro_batches)
    assert origin.completed == micro_batches


def summed(computes: Sequence[Compute]) -> dict[int, Tensor]:
    """Each fragment's mean gradient [n] a token, over all peers that hold it."""
    total: dict[int, Tensor] = {}
    tokens: dict[int, int] = {}
    for compute in computes:
        sums = compute.span.stages.sums
        for index, live in enumerate(compute.span.inner.lives):
            name = live.fragment.index
            total[name] = total.get(name, torch.zeros(())) + sums.filled[index]
            tokens[name] = tokens.get(name, 0) + sums.filled_tokens[index]
    return {name: total[name] / tokens[name] for name in total}


@pytest.mark.parametrize(
    ("train", "logits_at_once", "atol"),
    [
        pytest.param({}, decoder.LOGITS_AT_ONCE, 1e-5, id="as it is"),
        pytest.param({}, 1000, 1e-5, id="the loss in parts"),
        pytest.param({"recompute": True}, decoder.LOGITS_AT_ONCE, 1e-5, id="blocks computed again"),
        pytest.param({"weights": "bfloat16"}, decoder.LOGITS_AT_ONCE, 2e-2, id="bf16 weights"),
    ],
)
@pytest.mark.parametrize("bottleneck", [None, 8])
def test_gradients_over_overlapping_spans_are_those_of_one_process(
    setup_of: MakeSetup,
    train: dict[str, Any],
    logits_at_once: int,
    atol: float,
    bottleneck: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder, "LOGITS_AT_ONCE", logits_at_once)

    def narrowed(name: str) -> ComputeSetup:
        setup = setup_of(name)
        model = setup.config.model.model_copy(update={"bottleneck": bottleneck})
        return dataclasses.replace(setup, config=setup.config.model_copy(update={"model": model}))

    computes = {name: Compute(with_span(narrowed(name), span, **train)) for name, span in SPANS.items()}
    world = world_of(computes, per_step=1 << 30)
    carried(world, 12)
    assert all(compute.span.stages.sums.executions for compute in computes.values()), "all have carried something"
    seen = {tokens for compute in computes.values() for tokens in compute.span.stages.sums.filled_tokens}
    assert len(seen) > 1, "not all micro-batches took the same route"
    whole = Compute(with_span(narrowed("A"), None))
    whole.span.inner.zero_grad()
    for inputs_BT, targets_BT in batches(computes["A"], 12):
        (decoder.loss_of(nn.Sequential(*whole.span.layers)(inputs_BT), targets_BT) / 12).backward()  # type: ignore[no-untyped-call]
    found = summed(list(computes.values()))
    for live in whole.span.inner.lives:
        error = torch.linalg.vector_norm(found[live.fragment.index] - live.grad)
        assert error <= atol * torch.linalg.vector_norm(live.grad)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_over_three_unequal_spans_has_the_losses_of_one_process(setup_of: MakeSetup, optimizer: str) -> None:
    """One micro-batch at a time, so every step is taken before the next forward pass."""
    spans = {"A": (0, 1), "B": (1, 4), "C": (4, 5)}
    parts = {name: Compute(with_span(setup_of(name), span, optimizer=optimizer)) for name, span in spans.items()}
    world = world_of(parts, per_step=1)
    origin = world.peers[PeerId("A")].routes
    origin.load.set_stage(dataclasses.replace(origin.stage, capacity=1))
    origin.in_flight.size = 1
    carried(world, 60)
    whole = Compute(with_span(setup_of("A"), None, optimizer=optimizer))
    for _ in range(60):
        whole.step()
    apart = {index: theta for part in parts.values() for index, theta in thetas(part).items()}
    together = thetas(whole)
    assert {part.counters.own_steps for part in parts.values()} == {60}
    assert max(float((apart[index] - together[index]).abs().max()) for index in together) < 1e-3
    for gossiped in whole.gossip.fragments:
        before = gossiped.live.theta.clone()
        gossiped.live.theta.copy_(apart[gossiped.live.fragment.index])
        apart[gossiped.live.fragment.index] = before
    carried_loss = whole.do(jobs.Evaluate())
    for gossiped in whole.gossip.fragments:
        gossiped.live.theta.copy_(apart[gossiped.live.fragment.index])
    plain_loss = whole.do(jobs.Evaluate())
    assert isinstance(carried_loss, jobs.Evaluated)
    assert isinstance(plain_loss, jobs.Evaluated)
    assert abs(carried_loss.loss - plain_loss.loss) < 1e-3
    assert carried_loss.loss < 3.5


def thetas(compute: Compute) -> dict[int, Tensor]:
    return {one.live.fragment.index: one.live.theta.clone() for one in compute.gossip.fragments}


@pytest.mark.parametrize(("wire", "error"), [("bf16", 2**-8), ("int8", 1 / 127)])
def test_hidden_values_on_the_wire_are_off_by_no_more_than_the_codec_says(wire: str, error: float) -> None:
    values = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(7)) * torch.logspace(-3, 3, 32)
    flat = values.flatten()
    read = blockwise.decode(wire, memoryview(blockwise.encode(wire, flat)), flat.numel())
    largest = torch.nn.functional.pad(flat.abs(), (0, -flat.numel() % 256)).view(-1, 256).amax(dim=1)
    bound = largest.repeat_interleave(256)[: flat.numel()] * error
    assert bool(((read - flat).abs() <= bound).all())


@pytest.mark.parametrize(("wire", "within"), [("bf16", 0.02), ("int8", 0.05)])
def test_gradients_through_a_narrow_wire_point_the_same_way(setup_of: MakeSetup, wire: str, within: float) -> None:
    found = {}
    for each in ("fp32", wire):
        computes = {name: Compute(with_span(setup_of(name), span, each)) for name, span in SPANS.items()}
        for compute in computes.values():
            compute.numbers.least = 0
            compute.numbers.reserved = 1 << 30
        carried(world_of(computes, per_step=1 << 30), 4)
        found[each] = torch.cat([part for _, part in sorted(summed(list(computes.values())).items())])
    apart = torch.linalg.vector_norm(found[wire] - found["fp32"]) / torch.linalg.vector_norm(found["fp32"])
    assert 0 < float(apart) < within


def test_uneven_micro_batches_give_the_exact_mean_over_tokens(setup_of: MakeSetup) -> None:
    one, other = (Compute(with_span(setup_of(n), (2, 5))) for n in "AB")
    small, large = (_entering(one, sequences) for sequences in (1, 3))
    for compute, parts in ((one, [small]), (other, [large])):
        for local_id, (layout, blob, sequences) in enumerate(parts):
            assert isinstance(compute.do(jobs.Forward(local_id, 2, 5, sequences, layout, blob)), jobs.BackwardDone)
    together = summed([one, other])
    assert one.span.stages.sums.filled_tokens == [16, 16, 16]
    both = Compute(with_span(setup_of("C"), (2, 5)))
    for local_id, (layout, blob, sequences) in enumerate((small, large)):
        both.do(jobs.Forward(local_id, 2, 5, sequences, layout, blob))
    alone = summed([both])
    for index, gradient in alone.items():
        assert torch.allclose(together[index], gradient, atol=1e-6)


def _entering(compute: Compute, sequences: int) -> tuple[Layout, bytes, int]:
    (layout,) = compute.span.forms(2, sequences).entering
    hidden = torch.randn(sequences * 16 * 32, generator=torch.Generator().manual_seed(sequences))
    targets = torch.arange(sequences * 16, dtype=torch.int64).to(torch.uint16).view(torch.uint8).numpy().tobytes()
    return layout, blockwise.encode("fp32", hidden) + targets, sequences


@pytest.mark.parametrize("flaw", ["nan", "target", "cut", "long", "layout"])
def test_what_is_not_hidden_values_and_targets_is_refused_and_changes_nothing(setup_of: MakeSetup, flaw: str) -> None:
    compute = Compute(with_span(setup_of("C"), (2, 5)))
    layout, blob, sequences = _entering(compute, 2)
    expected = {"nan": "nan", "target": "vocabulary"}.get(flaw, "shape")
    blob = {
        "nan": b"\x00\x00\xc0\x7f" + blob[4:],
        "target": blob[:-2] + b"\x00\x01",
        "cut": blob[:-1],
        "long": blob + b"x",
    }.get(flaw, blob)
    if flaw == "layout":
        layout = layout[::-1]
    assert compute.do(jobs.Forward(1, 2, 5, sequences, layout, blob)) == jobs.ExecutionFailed(1, expected)
    assert compute.span.stages.sums.executions == []
    assert not compute.span.stages.pending


def test_a_forgotten_execution_cannot_go_back(computes: dict[str, Compute]) -> None:
    compute = computes["A"]
    drawn = compute.do(jobs.Draw(1, 3))
    assert isinstance(drawn, jobs.ForwardDone)
    compute.do(jobs.Forget((1,)))
    section = drawn.layout[:1]
    assert compute.do(jobs.Backward(1, section, bytes(section[0].size))) == jobs.ExecutionFailed(1, "forgotten")


def test_a_dropped_sum_moves_nothing_and_an_applied_one_does(computes: dict[str, Compute]) -> None:
    compute = computes["C"]
    layout, blob, sequences = _entering(compute, 2)
    before = [gossiped.live.theta.clone() for gossiped in compute.gossip.fragments]
    compute.do(jobs.Forward(1, 2, 5, sequences, layout, blob))
    assert compute.do(jobs.Seal()) == jobs.Sealed((1,))
    compute.do(jobs.Drop())
    compute.do(jobs.Apply(0, 0, 1.0))
    assert all(torch.equal(m.live.theta, old) for m, old in zip(compute.gossip.fragments, before, strict=True))
    compute.do(jobs.Forward(2, 2, 5, sequences, layout, blob))
    compute.do(jobs.Seal())
    compute.do(jobs.Apply(0, 0, 1.0))
    assert not any(torch.equal(m.live.theta, old) for m, old in zip(compute.gossip.fragments, before, strict=True))


@pytest.mark.parametrize("last", [4, 5])
def test_an_execution_that_is_undone_leaves_the_sum_of_the_others(setup_of: MakeSetup, last: int) -> None:
    """Whether it ends with the model's last layer, or got a gradient from a later peer."""
    undone, other = (Compute(with_span(setup_of("C"), (2, last))) for _ in range(2))
    passes = [_passes(undone, local_id, sequences, last) for local_id, sequences in ((1, 1), (2, 3))]
    for job in (*passes[0], *passes[1]):
        undone.do(job)
    forward, *rest = passes[1]
    assert undone.do(jobs.Undo(forward, *rest)) == jobs.Undone(2, True)
    for job in passes[0]:
        other.do(job)
    assert undone.span.stages.sums.executions == other.span.stages.sums.executions == [1]
    assert undone.span.stages.sums.filled_tokens == other.span.stages.sums.filled_tokens
    for found, expected in zip(undone.span.stages.sums.filled, other.span.stages.sums.filled, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)
        assert bool(expected.any())


def test_an_execution_that_is_in_no_sum_cannot_be_undone(computes: dict[str, Compute]) -> None:
    compute = computes["C"]
    layout, blob, sequences = _entering(compute, 2)
    assert compute.do(jobs.Undo(jobs.Forward(1, 2, 5, sequences, layout, blob))) == jobs.Undone(1, False)


def _passes(compute: Compute, local_id: int, sequences: int, last: int) -> tuple[Any, ...]:
    """The jobs of an execution through layers [2, last)."""
    layout, blob, _ = _entering(compute, sequences)
    forward = jobs.Forward(local_id, 2, last, sequences, layout, blob)
    if last == 5:
        return (forward,)
    (back,) = compute.span.forms(last, sequences).gradients
    gradient = torch.randn(sequences * 16 * 32, generator=torch.Generator().manual_seed(local_id))
    return forward, jobs.Backward(local_id, back, blockwise.encode("fp32", gradient))


def test_what_measuring_the_device_leaves_behind_is_in_no_sum(setup_of: MakeSetup) -> None:
    """Its backward passes went into the first sum: a newcomer's, without weights then, was not finite."""
    compute = Compute(with_span(setup_of("A"), SPANS["A"]))
    measure.measure(compute.span.forward, compute.setup.config.model, compute.setup.device, 2)
    compute.do(jobs.Start(newcomer=False))
    assert not any(bool(filled.any()) for filled in compute.span.stages.sums.filled)


def test_numbers_of_micro_batches_are_never_given_out_twice(setup_of: MakeSetup) -> None:
    setup = with_span(setup_of("A"), (0, 3))
    numbers = []
    for life in range(3):
        compute = Compute(setup)
        for local_id in range(3):
            drawn = compute.do(jobs.Draw(local_id, 3))
            assert isinstance(drawn, jobs.ForwardDone)
            numbers.append(drawn.number)
            if life == 0 and local_id == 0:
                compute.do(jobs.Save())
        compute.resume()
    assert len(set(numbers)) == 9


def test_a_span_has_the_weights_that_the_whole_model_has_there(setup_of: MakeSetup) -> None:
    whole = Compute(with_span(setup_of("A"), None))
    for span in SPANS.values():
        part = Compute(with_span(setup_of("A"), span))
        for gossiped in part.gossip.fragments:
            same = whole.gossip.fragments[gossiped.live.fragment.index]
            assert torch.equal(gossiped.live.theta, same.live.theta)


def test_a_whole_model_peer_serves_routes_and_goes_on_training_by_itself(setup_of: MakeSetup) -> None:
    compute = Compute(with_span(setup_of("A"), None))
    layout, blob, sequences = _entering(compute, 2)
    compute.do(jobs.Forward(1, 2, 5, sequences, layout, blob))
    compute.step()
    assert compute.span.stages.sums.filled_tokens == [0, 0, 32, 32, 32]
    compute.do(jobs.Seal())
    stepped = compute.do(jobs.Apply(0, 0, 2.5))
    assert isinstance(stepped, jobs.Stepped)
    assert [live.steps for live in compute.span.inner.lives] == [1, 1, 2, 2, 2]


def test_layouts_name_what_travels() -> None:
    run = config.Config(model=config.ModelConfig(depth=1, width=32, context=16))
    forms = ActivationFormat(run, blockwise, decoder.widths(run.model)).forms(1, 2)
    hidden, targets = ("hidden", "bf16", 1024, 2048), ("targets", "u16", 32, 64)
    assert [tuple(map(_named, layout)) for layout in forms.entering] == [(hidden, targets)]
    assert [tuple(map(_named, layout)) for layout in forms.gradients] == [(hidden,)]


def test_over_a_thin_link_hidden_values_have_half_the_bytes_and_gradients_a_quarter() -> None:
    model, routes = config.ModelConfig(depth=1, width=32, context=16), config.RoutesConfig(wire="auto")
    forms = ActivationFormat(config.Config(model=model, routes=routes), blockwise, decoder.widths(model)).forms(1, 2)
    assert [_named(layout[0])[1:] for layout in forms.entering] == [("bf16", 1024, 2048), ("int8", 1024, 1032)]
    assert [_named(layout[0])[1:] for layout in forms.gradients] == [("bf16", 1024, 2048), ("q4", 1024, 528)]


def _named(section: Section) -> tuple[str, str, int, int]:
    return section.name, section.codec, section.elements, section.size


@pytest.mark.parametrize("thin", [False, True])
def test_either_form_is_read_by_all(setup_of: MakeSetup, thin: bool) -> None:
    """Which one comes is the sender's affair: its link is thin or not."""
    setups = [with_span(setup_of(name), span, "auto") for name, span in (("A", (0, 2)), ("B", (2, 5)))]
    before, after = map(Compute, setups)
    drawn = before.do(jobs.Draw(1, 2, thin))
    assert isinstance(drawn, jobs.ForwardDone)
    assert drawn.layout[0].codec == ("int8" if thin else "bf16")
    back = after.do(jobs.Forward(1, 2, 5, drawn.sequences, drawn.layout, drawn.blob, thin))
    assert isinstance(back, jobs.BackwardDone)
    assert back.layout[0].codec == ("q4" if thin else "bf16")
    backed = before.do(jobs.Backward(1, back.layout, back.blob, thin))
    assert isinstance(backed, jobs.BackwardDone)
    given = blockwise.decode(back.layout[0].codec, memoryview(back.blob), back.layout[0].elements)
    assert backed.given_norm == pytest.approx(float(given.norm()))


def test_a_micro_batch_of_our_own_through_the_whole_model_goes_back_at_once(setup_of: MakeSetup) -> None:
    compute = Compute(with_span(setup_of("A", algorithm="synchronous"), None))
    backed = compute.do(jobs.Draw(1, 5))
    assert isinstance(backed, jobs.BackwardDone)
    assert (backed.number, backed.tokens, backed.blob) == (0, 64, b"")
    alone = Compute(with_span(setup_of("B"), None))
    inputs_BT, targets_BT = batches(compute, 1)[0]
    alone.span.inner.zero_grad()
    (decoder.loss_of(alone.span.forward(inputs_BT), targets_BT) * 64).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(compute.span.inner.lives, alone.span.inner.lives, strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


def test_a_round_with_a_stray_execution_publishes_no_sum_and_the_next_one_starts_from_nothing(
    setup_of: MakeSetup,
) -> None:
    compute = Compute(with_span(setup_of("C", algorithm="synchronous"), (2, 5)))
    layout, blob, sequences = _entering(compute, 2)
    for local_id in (1, 2):
        compute.do(jobs.Forward(local_id, 2, 5, sequences, layout, blob))
    assert compute.do(jobs.CloseRound(0, (1,))) == jobs.RoundClosed(0, (1, 2), ())
    compute.do(jobs.Forward(3, 2, 5, sequences, layout, blob))
    closed = compute.do(jobs.CloseRound(1, (3,)))
    assert isinstance(closed, jobs.RoundClosed)
    assert [(one.fragment, one.tokens) for one in closed.sums] == [(2, 32), (3, 32), (4, 32)]
    assert all(float(live.grad.abs().max()) == 0 for live in compute.span.inner.lives)


def test_the_same_sums_in_any_order_of_arrival_give_the_same_bits(setup_of: MakeSetup) -> None:
    sums: dict[int, tuple[jobs.Contribution, ...]] = {}
    replicas = [Compute(with_span(setup_of(name, algorithm="synchronous"), (2, 5))) for name in "CDE"]
    for sequences, compute in enumerate(replicas, start=1):
        layout, blob, _ = _entering(compute, sequences)
        compute.do(jobs.Forward(1, 2, 5, sequences, layout, blob))
        closed = compute.do(jobs.CloseRound(0, (1,)))
        assert isinstance(closed, jobs.RoundClosed)
        for one in closed.sums:
            part = jobs.Contribution(compute.setup.peer, one.tokens, one.layout, one.blob)
            sums[one.fragment] = (*sums.get(one.fragment, ()), part)
    for shift, compute in enumerate(replicas):
        turned = tuple((index, parts[shift:] + parts[:shift]) for index, parts in sorted(sums.items()))
        stepped = compute.do(jobs.Advance(0, turned, (), 16, 1, 2.5))
        assert isinstance(stepped, jobs.Stepped)
        assert (stepped.lr_step, stepped.refused) == (1, ())
        for live, first in zip(compute.span.inner.lives, replicas[0].span.inner.lives, strict=True):
            assert live.steps == 1
            assert torch.equal(live.theta, first.theta)


@pytest.mark.parametrize(("number", "reason"), [(float("nan"), "nan"), (3e38, "magnitude"), (1e20, "magnitude")])
def test_a_sum_that_no_step_could_take_is_left_out_by_all_and_named(
    setup_of: MakeSetup, number: float, reason: str
) -> None:
    compute = Compute(with_span(setup_of("C", algorithm="synchronous"), (2, 5)))
    fragment = compute.fragments[0]
    layout = (Section("gradient", "fp32", fragment.parameters, 4 * fragment.parameters),)
    blob = blockwise.encode("fp32", torch.full((fragment.parameters,), number))
    bad = jobs.Contribution(PeerId("X"), 16, layout, blob)
    before = compute.span.inner.lives[0].theta.clone()
    stepped = compute.do(jobs.Advance(0, ((fragment.index, (bad,)),), (), 16, 1, 2.5))
    assert isinstance(stepped, jobs.Stepped)
    assert stepped.refused == ((fragment.index, PeerId("X"), reason),)
    assert torch.equal(compute.span.inner.lives[0].theta, before)


def test_if_a_fragments_sum_is_none_that_others_take_nothing_of_the_round_counts(setup_of: MakeSetup) -> None:
    compute = Compute(with_span(setup_of("C", algorithm="synchronous"), (2, 5)))
    layout, blob, sequences = _entering(compute, 2)
    compute.do(jobs.Forward(1, 2, 5, sequences, layout, blob))
    compute.span.inner.lives[0].grad.fill_(1e20)
    assert compute.do(jobs.CloseRound(0, (1,))) == jobs.RoundClosed(0, (1,), ())


def test_a_newcomer_of_a_synchronous_run_takes_the_same_step_as_its_donor(setup_of: MakeSetup) -> None:
    donor, newcomer = (Compute(with_span(setup_of(name, algorithm="synchronous"), (2, 5))) for name in "CN")
    layout, blob, sequences = _entering(donor, 2)
    for round in range(3):
        if round == 2:
            exported = [donor.do(jobs.ExportState(one.index)) for one in donor.fragments]
            states = tuple(
                (one.fragment, one.layout, one.blob) for one in exported if isinstance(one, jobs.StateExported)
            )
            assert newcomer.do(jobs.ImportState(states, 2)) == jobs.StateImported(True)
        donor.do(jobs.Forward(round, 2, 5, sequences, layout, blob))
        closed = donor.do(jobs.CloseRound(round, (round,)))
        assert isinstance(closed, jobs.RoundClosed)
        sums = tuple(
            (one.fragment, (jobs.Contribution(PeerId("C"), one.tokens, one.layout, one.blob),)) for one in closed.sums
        )
        for compute in [donor, newcomer][: 1 + (round == 2)]:
            compute.do(jobs.Advance(round, sums, (), 0, 0, 2.5))
    for one, other in zip(donor.span.inner.lives, newcomer.span.inner.lives, strict=True):
        assert (one.steps, other.steps) == (3, 3)
        assert torch.equal(one.theta, other.theta)
        assert torch.equal(one.state.exp_avg_sq, other.state.exp_avg_sq)


def _went_back(compute: Compute, local_id: int, gradient: float) -> jobs.Outcome:
    """The outcome of a backward pass through layers [2, 4) with a gradient of these numbers."""
    layout, blob, sequences = _entering(compute, 2)
    done = compute.do(jobs.Forward(local_id, 2, 4, sequences, layout, blob))
    assert isinstance(done, jobs.ForwardDone)
    elements = done.layout[0].elements
    packed = compute.span.stages.activations.encode_gradient(torch.full((elements,), gradient))
    return compute.do(jobs.Backward(local_id, *packed))


def test_a_gradient_that_is_finite_and_absurd_is_refused_before_anything_changes(computes: dict[str, Compute]) -> None:
    """The whole step was skipped in silence, and all micro-batches in it were journaled as counted."""
    compute = computes["B"]
    assert _went_back(compute, 1, 3e38) == jobs.ExecutionFailed(1, "magnitude")
    assert compute.span.stages.sums.executions == []
    assert 1 in compute.span.stages.pending, "another peer may give a better gradient"
    assert isinstance(_went_back(compute, 2, 1e-3), jobs.BackwardDone)
    assert compute.do(jobs.Seal()) == jobs.Sealed((2,))


def test_a_sum_whose_step_would_be_skipped_says_so_and_takes_none(computes: dict[str, Compute]) -> None:
    compute = computes["B"]
    for local_id in (1, 2):
        assert isinstance(_went_back(compute, local_id, 1e-3), jobs.BackwardDone)
    compute.span.stages.sums.filled[-1].fill_(3e38)  # a norm of it is not finite
    before = [live.theta.clone() for live in compute.span.inner.lives]
    sealed = compute.do(jobs.Seal((1, 2), jobs.Apply(32, 2, 1.0)))
    assert sealed == jobs.Sealed((1, 2), sound=False)
    assert all(torch.equal(live.theta, old) for live, old in zip(compute.span.inner.lives, before, strict=True))


def test_what_a_peer_counts_its_optimizer_has_taken(computes: dict[str, Compute]) -> None:
    world = world_of(computes, per_step=1)
    carried(world, 30)
    lines = [line for peer in world.lines() for line in peer if line["event"] == "applied"]
    assert len(lines) >= 30
    assert audited(world.lines(), 5).sound


def test_a_peer_that_counts_more_than_its_optimizer_took_fails_the_audit(
    computes: dict[str, Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fragment's steps are skipped, whose gradients all peers count."""

    def skipped(live: Live, gradient: Tensor, lr_step: int, tokens: int) -> bool:
        return live.fragment.first != 0 and step_clipped(live, gradient, lr_step, tokens)

    monkeypatch.setattr(stage_runner, "step_clipped", skipped)
    world = world_of(computes, per_step=1)
    carried(world, 30)
    found = audited(world.lines(), 5)
    assert found.twice == ()
    assert found.unapplied > 0


@pytest.mark.parametrize(
    ("changed", "cosine", "ratio"),
    [(lambda g: g, 1.0, 1.0), (lambda g: -g, -1.0, 1.0), (lambda g: 10 * g, 1.0, 10.0), (lambda g: 0 * g, -1.0, 0.0)],
    ids=["equal", "backwards", "longer", "nothing"],
)
def test_gradients_are_compared_by_direction_and_length(
    computes: dict[str, Compute], changed: Callable[[Tensor], Tensor], cosine: float, ratio: float
) -> None:
    stages = computes["C"].span.stages
    gradient_BTD = torch.randn(2, stages.activations.context, stages.activations.widths[2])
    encode = stages.activations.encode_gradient
    compared = stages.compare(jobs.Compare(1, 2, 2, (encode(gradient_BTD), encode(changed(gradient_BTD)))))
    (found,) = compared.likeness
    assert (found.cosine, found.ratio) == pytest.approx((cosine, ratio), abs=1e-5)


def test_what_is_no_gradient_is_like_none(computes: dict[str, Compute]) -> None:
    stages = computes["C"].span.stages
    gradient_BTD = torch.randn(2, stages.activations.context, stages.activations.widths[2])
    layout, blob = stages.activations.encode_gradient(gradient_BTD)
    broken = layout, b"\xff" * len(blob)
    assert stages.compare(jobs.Compare(1, 2, 2, ((layout, blob), broken))).likeness == (UNLIKE,)
