"""A change of span: what stays is untouched, what comes is as it was given, what goes is retained on the disk."""

import gc
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from decentral.comm.codecs.sections import unpack
from decentral.core import config, jobs
from decentral.core.fragments import Layout
from decentral.engine import checkpoint
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.threads import finish
from decentral.model import decoder

MakeSetup = Callable[..., ComputeSetup]
LAST = (1, 3)  # layers; the model has an embedding, a block and a head, a fragment each
FIRST = (0, 2)


def peer(setup_of: MakeSetup, name: str, span: tuple[int, int]) -> Compute:
    """A peer that has trained a little, so that its weights and moments differ from others'."""
    compute = Compute(replace(setup_of(name), span=span))
    for gossiped in compute.gossip.fragments:
        gossiped.live.theta += 0.01 * torch.randn(
            len(gossiped.live.theta), generator=torch.Generator().manual_seed(len(name))
        )
        gossiped.live.state.exp_avg.fill_(0.5)
        gossiped.live.steps = 9
    return compute


def state_of(compute: Compute, fragment: int) -> tuple[int, Layout, bytes]:
    exported = compute.do(jobs.ExportState(fragment))
    assert isinstance(exported, jobs.StateExported)
    return exported.fragment, exported.layout, exported.blob


def thetas(compute: Compute) -> dict[int, torch.Tensor]:
    return {one.live.fragment.index: one.live.theta.clone() for one in compute.gossip.fragments}


def test_kept_layers_stay_as_they_are_and_new_ones_are_as_they_were_given(setup_of: MakeSetup) -> None:
    compute, donor = peer(setup_of, "A", LAST), peer(setup_of, "BB", FIRST)
    before = compute.gossip.fragments[0].live
    state = state_of(donor, 0)
    assert compute.do(jobs.ChangeSpan(*FIRST, (state,), 40)) == jobs.SpanChanged(True, retained=((2, 0),))
    assert [fragment.index for fragment in compute.fragments] == [0, 1]
    came, stayed = (gossiped.live for gossiped in compute.gossip.fragments)
    assert stayed is before
    assert stayed.steps == 9
    phi = unpack(compute.setup.codecs, state[1], state[2])["phi"]
    assert torch.equal(came.theta, phi)
    assert not came.state.exp_avg.any()
    assert compute.lr_step == 40
    layer = compute.span.layers[1]
    assert next(layer.parameters()).data_ptr() in range(
        stayed.theta.data_ptr(), stayed.theta.data_ptr() + 4 * len(stayed.theta)
    )


def test_a_newcomer_that_moves_is_still_a_newcomer_in_the_layers_that_it_keeps(setup_of: MakeSetup) -> None:
    compute = peer(setup_of, "A", LAST)
    compute.do(jobs.Start(newcomer=True))
    compute.do(jobs.ChangeSpan(*FIRST, (), 40))
    for index in (0, 1):
        compute.gossip.of(index).live.tokens = 64
        closed = compute.do(jobs.CloseWindow(index, 1))
        assert isinstance(closed, jobs.WindowClosed)
        assert closed.tokens == 0


def test_micro_batches_pass_through_the_new_layers(setup_of: MakeSetup) -> None:
    compute, last, donor = peer(setup_of, "A", LAST), peer(setup_of, "D", LAST), peer(setup_of, "BB", FIRST)
    compute.do(jobs.ChangeSpan(*FIRST, (state_of(donor, 0),), 0))
    begun = compute.do(jobs.Draw(1, 2))
    assert isinstance(begun, jobs.ForwardDone)
    backed = last.do(jobs.Forward(1, 2, 3, begun.sequences, begun.layout, begun.blob))
    assert isinstance(backed, jobs.BackwardDone)
    assert isinstance(compute.do(jobs.Backward(1, backed.layout, backed.blob)), jobs.BackwardDone)
    before = thetas(compute)
    compute.do(jobs.Seal())
    assert isinstance(compute.do(jobs.Apply(begun.tokens, 1, backed.loss)), jobs.Stepped)
    assert all(not torch.equal(theta, before[index]) for index, theta in thetas(compute).items())


def test_a_fragment_that_was_given_up_can_be_recovered_from_the_disk(setup_of: MakeSetup) -> None:
    compute, donor = peer(setup_of, "A", LAST), peer(setup_of, "BB", FIRST)
    compute.counters.lr_step = 30
    given_up = state_of(compute, 2)
    compute.do(jobs.ChangeSpan(*FIRST, (state_of(donor, 0),), 0))
    found = Compute(replace(setup_of("A"), span=FIRST))  # after a restart
    assert found.retained.steps(range(3)) == ((2, 30),)
    assert found.do(jobs.ExportRetained(2)) == jobs.RetainedExported(2, 30, *given_up[1:])
    assert found.do(jobs.ChangeSpan(*LAST, (given_up,), 30)) == jobs.SpanChanged(True, retained=((0, 0),))


def test_a_copy_of_another_holder_s_fragment_is_stored_served_and_taken_up(setup_of: MakeSetup) -> None:
    compute, holder = peer(setup_of, "A", FIRST), peer(setup_of, "BB", LAST)
    copy = state_of(holder, 2)
    assert compute.do(jobs.RetainCopy(*copy, 30)) == jobs.RetainedChanged(2, ((2, 30),))
    assert compute.do(jobs.ExportRetained(2)) == jobs.RetainedExported(2, 30, *copy[1:])
    assert compute.do(jobs.DropCopy(2, 29)) == jobs.RetainedChanged(2, ((2, 30),))
    assert compute.do(jobs.ChangeSpan(*LAST, (), 30)) == jobs.SpanChanged(True, retained=((0, 0),))
    assert torch.equal(thetas(compute)[2], unpack(compute.setup.codecs, *copy[1:])["phi"])
    assert compute.do(jobs.DropCopy(0, 0)) == jobs.RetainedChanged(0, ())


def test_a_copy_that_takes_too_much_of_the_disk_is_declined(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, holder = peer(setup_of, "A", FIRST), peer(setup_of, "BB", LAST)
    copy = state_of(holder, 2)
    assert compute.do(jobs.RetainCopy(*copy, 30)) == jobs.RetainedChanged(2, ((2, 30),))
    taken = (compute.setup.folder / "kept-2.safetensors").stat().st_size
    space = taken / checkpoint.COPIES_SHARE - taken  # with the old copy, just enough for the new one
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=space))
    assert compute.do(jobs.RetainCopy(*copy, 31)) == jobs.RetainedChanged(2, ((2, 31),))
    (compute.setup.folder / "kept-7.safetensors").write_bytes(bytes(2000))
    declined = compute.do(jobs.RetainCopy(*copy, 32))
    assert isinstance(declined, jobs.RetainedChanged)
    assert declined.retained == ((2, 31),)
    assert "too large for the disk" in declined.reason


def test_a_checkpoint_after_a_move_goes_on_with_the_new_layers(setup_of: MakeSetup) -> None:
    compute, donor = peer(setup_of, "A", LAST), peer(setup_of, "BB", FIRST)
    compute.do(jobs.ChangeSpan(*FIRST, (state_of(donor, 0),), 0))
    compute.do(jobs.Save())
    found = Compute(replace(setup_of("A"), span=FIRST))
    assert found.resume()
    for index, theta in thetas(compute).items():
        assert torch.equal(thetas(found)[index], theta)
    assert [gossiped.live.steps for gossiped in found.gossip.fragments] == [0, 9]


@pytest.mark.parametrize("phases", range(1, 7))
def test_a_checkpoint_during_a_change_of_span_is_of_one_span(setup_of: MakeSetup, phases: int) -> None:
    compute = peer(setup_of, "A", LAST)
    saving = compute.program(jobs.Save())
    for _ in range(phases):
        next(saving)
    assert compute.do(jobs.ChangeSpan(*FIRST, (), 40)) == jobs.SpanChanged(True, retained=((2, 0),))
    finish(saving)
    span = checkpoint.span(compute.setup.folder)
    again = Compute(replace(compute.setup, span=span))
    assert again.resume()
    assert span == (FIRST if phases <= 2 else LAST)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda state: (1, *state[1:]), "fragment"),
        (lambda state: (0, state[1] * 2, 2 * state[2]), "shape"),
        (lambda state: (0, state[1], b"\xff" * len(state[2])), "nan"),
    ],
)
def test_an_invalid_state_changes_nothing(
    setup_of: MakeSetup, spoil: Callable[[jobs.Donated], jobs.Donated], reason: str
) -> None:
    compute, donor = peer(setup_of, "A", LAST), peer(setup_of, "BB", FIRST)
    before = thetas(compute)
    assert compute.do(jobs.ChangeSpan(*FIRST, (spoil(state_of(donor, 0)),), 40)) == jobs.SpanChanged(False, reason)
    assert all(torch.equal(theta, before[index]) for index, theta in thetas(compute).items())
    assert compute.lr_step == 0
    assert compute.retained.steps(range(3)) == ()


def test_a_device_whose_memory_is_full_goes_back_to_its_old_layers(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, donor = peer(setup_of, "A", LAST), peer(setup_of, "BB", FIRST)
    build = decoder.build

    def full(
        model: config.ModelConfig, seed: int, first: int = 0, last: int | None = None, drawn: bool = True
    ) -> list[nn.Module]:
        if first == 0:
            raise torch.OutOfMemoryError("no memory for layer 0")
        return build(model, seed, first, last, drawn)

    state = state_of(donor, 0)
    monkeypatch.setattr(decoder, "build", full)
    for index in (1, 2):
        compute.gossip.of(index).live.theta += 0.5
        compute.do(jobs.CloseWindow(index, 1))
    before = [state_of(compute, index) for index in (1, 2)]
    assert compute.do(jobs.ChangeSpan(*FIRST, (state,), 40)) == jobs.SpanChanged(False, "memory")
    assert [state_of(compute, index) for index in (1, 2)] == before
    assert [fragment.index for fragment in compute.fragments] == [1, 2]


def test_a_full_disk_changes_nothing(setup_of: MakeSetup) -> None:
    compute, donor = peer(setup_of, "A", LAST), peer(setup_of, "BB", FIRST)
    before = thetas(compute)
    (compute.setup.folder / "kept-2.safetensors.new").mkdir()
    assert compute.do(jobs.ChangeSpan(*FIRST, (state_of(donor, 0),), 40)) == jobs.SpanChanged(False, "disk")
    assert all(torch.equal(theta, before[index]) for index, theta in thetas(compute).items())


@pytest.mark.parametrize("phases", range(1, 4))  # the next one, a correction, comes before a change of span
def test_a_change_that_fails_while_a_fragment_wakes_counts_its_progress_once(setup_of: MakeSetup, phases: int) -> None:
    """What it has trained at rest is taken in for the retained state, and its own job was about to take it in."""
    compute = peer(setup_of, "A", LAST)
    gossiped = compute.gossip.of(2)
    compute.do(jobs.Rest(2))
    gossiped.live.theta += 0.5
    goal = gossiped.live.theta.clone()
    closing = compute.program(jobs.CloseWindow(2, 1))
    for _ in range(phases):
        next(closing)
    (compute.setup.folder / "kept-2.safetensors.new").mkdir()
    assert compute.do(jobs.ChangeSpan(*FIRST, (), 40)) == jobs.SpanChanged(False, "disk")
    finish(closing)
    compute.do(jobs.Merge(2, 1, ()))
    for seq in range(2, 5):
        gossiped.live.theta += 0.25
        compute.do(jobs.CloseWindow(2, seq))
        compute.do(jobs.Merge(2, seq, ()))
    _, layout, blob = state_of(compute, 2)
    torch.testing.assert_close(unpack(compute.setup.codecs, layout, blob)["phi"], goal + 0.75, rtol=0, atol=0.02)
    torch.testing.assert_close(gossiped.live.theta, goal + 0.75, rtol=0, atol=0.02)


def test_a_retained_state_that_is_damaged_or_of_another_run_is_ignored(setup_of: MakeSetup) -> None:
    compute, donor = peer(setup_of, "A", LAST), peer(setup_of, "BB", FIRST)
    compute.do(jobs.ChangeSpan(*FIRST, (state_of(donor, 0),), 0))
    other = replace(compute.retained, run="another")
    assert other.steps(range(3)) == ()
    path = compute.setup.folder / "kept-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert compute.retained.steps(range(3)) == ()
    assert compute.do(jobs.ExportRetained(2)) == jobs.RetainedExported(2, 0, (), b"")


def test_layers_that_are_given_up_are_let_go_before_new_ones_are_built(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, donor = peer(setup_of, "A", LAST), peer(setup_of, "BB", FIRST)
    head, build = weakref.ref(compute.span.layers[-1]), decoder.build
    while_building: list[object] = []

    def watching(
        model: config.ModelConfig, seed: int, first: int = 0, last: int | None = None, drawn: bool = True
    ) -> list[nn.Module]:
        gc.collect()
        while_building.append(head())
        return build(model, seed, first, last, drawn)

    monkeypatch.setattr(decoder, "build", watching)
    compute.do(jobs.ChangeSpan(*FIRST, (state_of(donor, 0),), 0))
    assert while_building == [None]


def test_a_whole_model_peer_has_no_sums_of_gradients_before_a_route_needs_them(setup_of: MakeSetup) -> None:
    span = Compute(setup_of("A")).span
    assert span._stages is None
    assert span.stages is span.stages
    assert not span.stages.only_routed
