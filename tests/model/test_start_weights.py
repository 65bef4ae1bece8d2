"""A run that starts from a folder: members with and without it, and layers that nobody holds any more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decentral.core import config, jobs
from decentral.core.errors import UserError
from decentral.data import run_inputs
from decentral.engine.compute import Compute, ComputeSetup
from decentral.model import decoder
from tests.model.hf_folders import made

MakeSetup = Callable[..., ComputeSetup]
MISSING = "this run starts from the weights of a folder, and no peer gave them"
FIRST, LAST = (0, 1), (1, 4)


@pytest.fixture
def member(setup_of: MakeSetup, tmp_path: Path) -> Callable[..., ComputeSetup]:
    """`member(peer, folder, span)`: a peer of the run; without `folder` it has only what travels."""
    made(tmp_path / "model", "qwen2")
    keys = [f"model.from={tmp_path / 'model'}", "model.context=16", "gossip.fragment_parameters=1000"]

    def build(
        peer: str, folder: bool = True, span: tuple[int, int] | None = None, expected: bool = False
    ) -> ComputeSetup:
        setup = setup_of(peer)
        run = run_inputs.sealed(config.load(None, [*keys, "train.micro_batch=4"]))
        model = run.model if folder else run.model.model_copy(update={"start_from": None})
        run = run.model_copy(update={"data": setup.config.data, "model": model})
        return replace(setup, config=run, span=span, state_expected=expected)

    return build


def state_of(compute: Compute, index: int) -> jobs.Donated:
    done = compute.do(jobs.ExportState(index))
    assert isinstance(done, jobs.StateExported)
    return done.fragment, done.layout, done.blob


def test_all_members_are_in_one_run_wherever_their_folders_are(member: MakeSetup) -> None:
    with_folder, without = member("A").config, member("B", folder=False).config
    assert with_folder.digest() == without.digest()
    assert with_folder.model.weights is not None
    assert "model.from" not in with_folder.canonical()


def test_a_member_without_the_folder_trains_with_what_donors_give(member: MakeSetup) -> None:
    donor, newcomer = Compute(member("A")), Compute(member("B", folder=False, expected=True))
    states = tuple(state_of(donor, cut.index) for cut in donor.fragments)
    assert newcomer.do(jobs.ImportState(states, 1)) == jobs.StateImported(True)
    newcomer.do(jobs.Start(True))
    for one, other in zip(newcomer.span.inner.lives, donor.span.inner.lives, strict=True):
        torch.testing.assert_close(one.theta, other.theta, rtol=0, atol=0.05)
    assert newcomer.step().loss > 0


def test_a_member_that_nobody_gives_weights_says_so_and_draws_none(member: MakeSetup) -> None:
    newcomer = Compute(member("B", folder=False, expected=True))
    failed = newcomer.do(jobs.Start(False))
    assert isinstance(failed, jobs.JobFailed)
    assert failed.reason.startswith(MISSING)
    with pytest.raises(UserError, match=MISSING):
        Compute(member("C", folder=False))


def test_layers_without_a_holder_begin_with_the_folders_weights(member: MakeSetup) -> None:
    compute, whole = Compute(member("A", span=LAST)), decoder.build(member("A").config.model, 0)
    assert compute.do(jobs.ChangeSpan(0, 2, (), 40)) == jobs.SpanChanged(
        True, retained=compute.retained.steps(range(4))
    )
    for layer, known in zip(compute.span.layers, whole[:2], strict=True):
        pairs = zip(layer.parameters(), known.parameters(), strict=True)
        assert all(torch.allclose(one, other) for one, other in pairs)


def test_a_peer_without_the_folder_takes_layers_that_others_give_and_no_others(member: MakeSetup) -> None:
    donor = Compute(member("D", span=(0, 2)))
    compute = Compute(member("B", folder=False, span=LAST, expected=True))
    states = tuple(state_of(Compute(member("E")), index) for index in (1, 2, 3))
    compute.do(jobs.ImportState(states, 1))
    compute.do(jobs.Start(True))
    before = [live.theta.clone() for live in compute.span.inner.lives]
    assert compute.do(jobs.ChangeSpan(0, 2, (), 40)) == jobs.SpanChanged(False, "no-weights")
    assert [cut.index for cut in compute.fragments] == [1, 2, 3]
    for live, known in zip(compute.span.inner.lives, before, strict=True):
        torch.testing.assert_close(live.theta, known, rtol=0, atol=0.05)
    changed = compute.do(jobs.ChangeSpan(0, 2, (state_of(donor, 0),), 40))
    assert isinstance(changed, jobs.SpanChanged)
    assert changed.accepted
    assert [cut.index for cut in compute.fragments] == [0, 1]


def test_a_folder_of_another_start_is_refused_unless_the_peer_has_begun(member: MakeSetup, tmp_path: Path) -> None:
    run = member("A").config
    other = run.model_copy(update={"model": run.model.model_copy(update={"weights": "0" * 32})})
    with pytest.raises(UserError, match="its weights are not this run's initial weights"):
        run_inputs.check(other, begun=False)
    run_inputs.check(other, begun=True)
    run_inputs.check(run, begun=False)
