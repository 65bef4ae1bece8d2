"""The work of the two threads, mostly without them: steps, windows, merges, checkpoints."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Packer, unpack
from decentral.comm.gossip.outer_kernels import TorchKernels
from decentral.core import jobs
from decentral.core.errors import UserError
from decentral.core.fragments import Layout
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution
from decentral.core.time_spent import NO_TIME
from decentral.engine import checkpoint
from decentral.engine import compute as compute_module
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.step import TimeAccount

MakeSetup = Callable[..., ComputeSetup]
ALGORITHMS = ["pull", "allreduce"]


def trained(setup: ComputeSetup, steps: int = 3) -> Compute:
    compute = Compute(setup)
    for _ in range(steps):
        compute.step()
    return compute


def weights(compute: Compute) -> Tensor:
    return torch.cat([gossiped.live.theta for gossiped in compute.gossip.fragments]).cpu().clone()


def close(compute: Compute, fragment: int = 0, seq: int = 1) -> Contribution:
    """Ends the window; gives all sections of it, as others would contribute it who asked for all."""
    closed = compute.do(jobs.CloseWindow(fragment, seq))
    assert isinstance(closed, jobs.WindowClosed)
    layout, blob = closed.layout, closed.blob
    if closed.on_request:
        names = tuple(section.name for section in closed.on_request)
        encoded = compute.do(jobs.EncodeSections(fragment, seq, names))
        assert isinstance(encoded, jobs.SectionsEncoded)
        assert encoded.layout == closed.on_request
        layout, blob = layout + encoded.layout, blob + encoded.blob
    return Contribution(compute.setup.peer, closed.tokens, layout, blob)


def merge(compute: Compute, *contributions: Contribution, fragment: int = 0, seq: int = 1) -> jobs.Merged:
    merged = compute.do(jobs.Merge(fragment, seq, contributions))
    assert isinstance(merged, jobs.Merged), merged
    return merged


def end_alone(compute: Compute, fragment: int = 0) -> None:
    """A whole window without a partner: a solo step."""
    close(compute, fragment)
    merge(compute, fragment=fragment)


def export(compute: Compute) -> list[tuple[int, Layout, bytes]]:
    exported = [compute.do(jobs.ExportState(fragment.index)) for fragment in compute.fragments]
    return [(one.fragment, one.layout, one.blob) for one in exported if isinstance(one, jobs.StateExported)]


def held_out_loss(compute: Compute) -> float:
    evaluated = compute.do(jobs.Evaluate())
    assert isinstance(evaluated, jobs.Evaluated)
    return evaluated.loss


def repacked(contribution: Contribution, change: Callable[[str, Tensor], Tensor]) -> Contribution:
    """The contribution with its vectors changed, and honestly packed again."""
    packer = Packer(blockwise)
    vectors = unpack(blockwise, contribution.layout, contribution.blob)
    for section in contribution.layout:
        packer.add(section.name, section.codec, change(section.name, vectors[section.name]))
    layout, blob = packer.finish()
    return replace(contribution, layout=layout, blob=blob)


# Training


def test_training_lowers_the_held_out_loss(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of())
    before = held_out_loss(compute)
    for _ in range(40):
        compute.step()
    assert held_out_loss(compute) < before - 1.0


def test_a_step_reports_what_it_did(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of())
    compute.step()
    report = compute.step()
    assert (report.step, report.lr_step, report.tokens, report.micro_batches) == (2, 2, 4 * 16, 1)
    assert 0 < report.spent.training == report.spent.total - report.spent.state


def test_the_same_peer_trains_the_same_bits(setup_of: MakeSetup) -> None:
    assert torch.equal(weights(trained(setup_of("A"))), weights(trained(setup_of("A"))))


def test_peers_start_from_the_same_weights_and_read_different_text(setup_of: MakeSetup) -> None:
    one, other = Compute(setup_of("A")), Compute(setup_of("B"))
    assert torch.equal(weights(one), weights(other))
    assert one.step().loss != other.step().loss


def test_evaluating_changes_nothing(setup_of: MakeSetup) -> None:
    one, other = trained(setup_of()), trained(setup_of())
    held_out_loss(one)
    assert one.step().loss == other.step().loss


def test_the_clock_follows_the_swarms_and_never_goes_back(setup_of: MakeSetup) -> None:
    compute = trained(setup_of(), 3)
    assert compute.do(jobs.SetClock(100)) == jobs.ClockSet(100)
    assert compute.do(jobs.SetClock(5)) == jobs.ClockSet(100)
    assert compute.step().lr_step == 101


# Windows and merges


def test_a_window_counts_the_tokens_since_the_last_one(setup_of: MakeSetup) -> None:
    compute = trained(setup_of(), 3)
    assert close(compute).tokens == 3 * 4 * 16
    compute.step()
    assert close(compute, seq=2).tokens == 4 * 16
    assert close(compute, seq=3).tokens == 0


def test_closing_one_fragment_leaves_the_count_of_the_others(setup_of: MakeSetup) -> None:
    compute = trained(setup_of(), 2)
    close(compute, fragment=0)
    assert close(compute, fragment=1).tokens == 2 * 4 * 16


def test_a_newcomers_first_window_carries_no_weight(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of())
    compute.do(jobs.Start(newcomer=True))
    compute.step()
    assert close(compute).tokens == 0
    compute.step()
    assert close(compute, seq=2).tokens == 4 * 16


def test_a_merge_with_nobody_is_a_solo_step(setup_of: MakeSetup) -> None:
    compute = trained(setup_of())
    close(compute)
    assert merge(compute) == jobs.Merged(0, 1, (), ())


def test_a_lone_peer_ends_where_its_training_took_it(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of())
    start = weights(compute)
    for _ in range(4):
        compute.step()
    goal = weights(compute)
    solo_windows(compute, 25)
    assert torch.linalg.vector_norm(weights(compute) - goal) < 0.02 * torch.linalg.vector_norm(goal - start)


def solo_windows(compute: Compute, count: int) -> None:
    for seq in range(1, count + 1):
        for fragment in compute.fragments:
            close(compute, fragment.index, seq)
            merge(compute, fragment=fragment.index, seq=seq)


@pytest.mark.parametrize("rests", [False, True])
def test_a_window_whose_exchange_ended_before_its_merge_is_not_lost(setup_of: MakeSetup, rests: bool) -> None:
    """A change of span that fails ends exchanges, and begins others for the same fragments."""
    compute = trained(setup_of())
    goal = compute.gossip.of(0).live.theta.clone()
    close(compute)
    if rests:
        compute.do(jobs.Rest(0))
    for seq in range(2, 25):
        close(compute, seq=seq)
        merge(compute, seq=seq)
    _, layout, blob = export(compute)[0]
    moved = torch.linalg.vector_norm(goal - Compute(compute.setup).gossip.of(0).live.theta)
    assert torch.linalg.vector_norm(unpack(blockwise, layout, blob)["phi"] - goal) < 0.02 * moved


def test_merging_with_each_other_brings_peers_together(setup_of: MakeSetup) -> None:
    one, other = trained(setup_of("A")), trained(setup_of("B"))
    apart = torch.linalg.vector_norm(weights(one) - weights(other))
    for seq in range(1, 15):
        for fragment in range(len(one.fragments)):
            ours, theirs = close(one, fragment, seq), close(other, fragment, seq)
            assert merge(one, theirs, fragment=fragment, seq=seq).used == (PeerId("B"),)
            assert merge(other, ours, fragment=fragment, seq=seq).used == (PeerId("A"),)
    assert torch.linalg.vector_norm(weights(one) - weights(other)) < 0.1 * apart


def test_what_was_trained_while_a_merge_was_pending_is_not_lost(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of())
    start = weights(compute)
    compute.step()
    for fragment in compute.fragments:
        close(compute, fragment.index)
    compute.step()
    goal = weights(compute)
    for fragment in compute.fragments:
        merge(compute, fragment=fragment.index)
    solo_windows(compute, 25)
    assert torch.linalg.vector_norm(weights(compute) - goal) < 0.02 * torch.linalg.vector_norm(goal - start)


# What is refused


def solo_twin(setup: ComputeSetup) -> Tensor:
    """The weights of a peer that took the same window alone."""
    compute = trained(setup)
    close(compute)
    merge(compute)
    return weights(compute)


def test_a_step_whose_gradient_is_not_finite_trains_nothing_and_says_so(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of())
    assert not compute.step().dropped
    theta = compute.gossip.fragments[-1].live.theta
    theta.fill_(1e30)
    before = theta.clone()
    stepped = compute.step()
    assert (stepped.dropped, stepped.tokens) == (True, 0)
    assert torch.equal(theta, before)


def test_steps_whose_loss_is_read_one_step_later_are_those_that_are_read_at_once(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, ahead = Compute(setup_of()), Compute(setup_of())
    expected = [at_once.step() for _ in range(3)]
    monkeypatch.setattr(compute_module, "steps_ahead", lambda device: 1)
    found = [ahead.step_ahead() for _ in range(3)]
    assert [len(steps) for steps in found] == [0, 1, 1]
    losses = [step.loss for steps in (*found, ahead.read_queued()) for step in steps]
    assert losses == [step.loss for step in expected]
    assert torch.equal(weights(ahead), weights(at_once))
    assert ahead.counters == at_once.counters


def test_a_step_that_turns_out_not_finite_one_step_later_is_no_longer_counted(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Compute(setup_of())
    monkeypatch.setattr(compute_module, "steps_ahead", lambda device: 1)
    live = compute.gossip.fragments[-1].live
    live.theta.fill_(1e30)
    before = live.theta.clone()
    assert compute.step_ahead() == []
    assert (live.steps, live.tokens > 0) == (1, True)
    (stepped,) = compute.read_queued()
    assert (stepped.dropped, stepped.tokens, compute.counters.tokens) == (True, 0, 0)
    assert (live.steps, live.tokens) == (0, 0)
    assert torch.equal(live.theta, before)


def with_nan(contribution: Contribution) -> Contribution:
    """The last section's first scale is NaN, as bf16 writes it."""
    start = sum(section.size for section in contribution.layout[:-1])
    blob = contribution.blob[:start] + b"\xc0\x7f" + contribution.blob[start + 2 :]
    return replace(contribution, blob=blob)


def test_a_contribution_with_nan_is_rejected_and_nothing_of_it_is_merged(setup_of: MakeSetup) -> None:
    ours, theirs = trained(setup_of("A")), trained(setup_of("B"))
    close(ours)
    merged = merge(ours, with_nan(close(theirs)))
    assert merged == jobs.Merged(0, 1, (), ((PeerId("B"), "nan"),))
    assert torch.equal(weights(ours), solo_twin(setup_of("A")))


def last_section(contribution: Contribution) -> Contribution:
    size = contribution.layout[-1].size
    return replace(contribution, layout=contribution.layout[-1:], blob=contribution.blob[-size:])


def renamed(contribution: Contribution) -> Contribution:
    layout = tuple(replace(section, name=section.name + "x") for section in contribution.layout)
    return replace(contribution, layout=layout)


WRONG: dict[str, Callable[[Contribution], Contribution]] = {
    "one number less": lambda one: repacked(one, lambda name, vector: vector[:-1]),
    "one number more": lambda one: repacked(one, lambda name, vector: torch.cat((vector, vector[:1]))),
    "a single number": lambda one: repacked(one, lambda name, vector: vector[:1]),
    "no numbers": lambda one: replace(one, layout=tuple(replace(s, elements=0, size=0) for s in one.layout), blob=b""),
    "a pseudo-gradient of another length": lambda one: repacked(
        one, lambda name, v: v[:1] if name == "pseudo_gradient" else v
    ),
    "slow weights alone": last_section,
    "no sections": lambda one: replace(one, layout=(), blob=b""),
    "other names": renamed,
    "a cut blob": lambda one: replace(one, blob=one.blob[:-1]),
    "a longer blob": lambda one: replace(one, blob=one.blob + b"\x00"),
    "an unknown codec": lambda one: replace(one, layout=tuple(replace(s, codec="zip") for s in one.layout)),
    "negative sizes": lambda one: replace(one, layout=tuple(replace(s, elements=-1, size=-1) for s in one.layout)),
    "a negative size that makes up for another": lambda one: replace(
        one, layout=(*one.layout, replace(one.layout[0], name="again", size=-1, elements=-1))
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_contribution_of_the_wrong_shape_is_rejected_and_nothing_of_it_is_merged(
    setup_of: MakeSetup, wrong: str
) -> None:
    ours, theirs = trained(setup_of("A")), trained(setup_of("B"))
    close(ours)
    merged = merge(ours, WRONG[wrong](close(theirs)))
    assert merged.used == ()
    assert [peer for peer, _ in merged.rejected] == [PeerId("B")]
    assert torch.equal(weights(ours), solo_twin(setup_of("A")))


def test_a_contribution_of_the_pseudo_gradient_alone_is_merged(setup_of: MakeSetup) -> None:
    ours, theirs = trained(setup_of("A")), trained(setup_of("B"))
    close(ours)
    whole = close(theirs)
    pseudo_gradient, *_ = whole.layout
    light = replace(whole, layout=(pseudo_gradient,), blob=whole.blob[: pseudo_gradient.size])
    assert merge(ours, light).used == (PeerId("B"),)
    assert not torch.equal(weights(ours), solo_twin(setup_of("A")))


@pytest.mark.parametrize(("optimizer", "share"), [("adamw", 0.2), ("muon", 1.0)])
def test_a_late_merge_moves_the_live_weights_less_with_adamw(optimizer: str, share: float, setup_of: MakeSetup) -> None:
    def with_optimizer(peer: str) -> ComputeSetup:
        setup = setup_of(peer)
        train = setup.config.train.model_copy(update={"optimizer": optimizer})
        return replace(setup, config=setup.config.model_copy(update={"train": train}))

    def moved_after(steps: int) -> float:
        ours, theirs = trained(with_optimizer("A")), trained(with_optimizer("B"))
        close(ours)
        for _ in range(steps):
            ours.step()
        before = weights(ours)
        ours.do(jobs.Merge(0, 1, (close(theirs),)))
        return float(torch.linalg.vector_norm(weights(ours) - before))

    assert moved_after(9) == pytest.approx(share * moved_after(1), rel=1e-3)


def test_one_bad_contribution_does_not_spoil_the_good_one_beside_it(setup_of: MakeSetup) -> None:
    ours, good, bad = (trained(setup_of(name)) for name in "ABC")
    close(ours)
    merged = merge(ours, with_nan(close(bad)), close(good))
    assert (merged.used, merged.rejected) == ((PeerId("B"),), ((PeerId("C"), "nan"),))
    (work,) = merged.work
    assert (work.peer, work.claimed) == ("B", work.own)
    assert 0.5 < work.length / work.own_length < 2.0


def test_a_pseudo_gradient_a_thousand_times_too_long_moves_us_hardly_further_than_an_ordinary_one(
    setup_of: MakeSetup,
) -> None:
    def moved_by(scale: float) -> float:
        ours, theirs = Compute(setup_of("A")), Compute(setup_of("B"))
        for seq in range(1, 6):
            ours.step()
            theirs.step()
            close(ours, seq=seq)
            contribution = close(theirs, seq=seq)
            merge(theirs, seq=seq)
            if seq == 5:
                contribution = repacked(contribution, lambda name, v: scale * v if name == "pseudo_gradient" else v)
            before = weights(ours)
            assert merge(ours, contribution, seq=seq).used == (PeerId("B"),)
        return float(torch.linalg.vector_norm(weights(ours) - before))

    assert moved_by(1000.0) < 3 * moved_by(1.0)


# A newcomer's state


def test_a_newcomer_starts_from_its_donors_weights(setup_of: MakeSetup) -> None:
    donor, newcomer = trained(setup_of("A"), 10), Compute(setup_of("B"))
    solo_windows(donor, 20)
    assert newcomer.do(jobs.ImportState(tuple(export(donor)), step=77)) == jobs.StateImported(True)
    assert held_out_loss(newcomer) == pytest.approx(held_out_loss(donor), abs=0.05)
    assert newcomer.step().lr_step == 78


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_state_with_one_bad_fragment_is_not_imported_at_all(setup_of: MakeSetup, algorithm: str) -> None:
    donor, newcomer = (trained(setup_of(name, algorithm=algorithm)) for name in "AB")
    blobs = export(donor)
    index, layout, blob = blobs[-1]
    before = weights(newcomer)
    for bad in (
        (index, layout, blob[:-4] + b"\x00\x00\xc0\x7f"),
        (index, layout, blob[:-1]),
        (index, layout[:-1], blob),
        (index, (), b""),
    ):
        imported = newcomer.do(jobs.ImportState((*blobs[:-1], bad), step=77))
        assert isinstance(imported, jobs.StateImported), imported
        assert not imported.accepted
        assert imported.reason
        assert torch.equal(weights(newcomer), before)
        assert newcomer.lr_step == 3


def test_a_fragment_that_nobody_gives_away_keeps_its_weights(setup_of: MakeSetup) -> None:
    donor, newcomer = (trained(setup_of(name)) for name in "AB")
    before = weights(newcomer)
    blobs = export(donor)
    assert newcomer.do(jobs.ImportState(tuple(blobs[:-1]), step=77)) == jobs.StateImported(True)
    kept, last = newcomer.gossip.fragments[-1].live.theta, blobs[-1][0]
    assert torch.equal(kept, before[-len(kept) :])
    assert not torch.equal(weights(newcomer), before)
    assert not newcomer.do(jobs.ImportState(((last + 1, *blobs[-1][1:]),), step=78)).accepted  # type: ignore[union-attr]


def test_exporting_changes_nothing(setup_of: MakeSetup) -> None:
    one, other = trained(setup_of()), trained(setup_of())
    export(one)
    assert one.step().loss == other.step().loss


# Checkpoints


def saved_and_resumed(compute: Compute) -> Compute:
    compute.do(jobs.Save())
    again = Compute(compute.setup)
    assert again.resume()
    return again


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_peer_takes_the_next_steps_bit_for_bit(setup_of: MakeSetup, algorithm: str) -> None:
    compute = trained(setup_of(algorithm=algorithm))
    for fragment in range(2):
        end_alone(compute, fragment)
    compute.step()
    again = saved_and_resumed(compute)
    for _ in range(2):
        ours, theirs = compute.step(), again.step()
        assert replace(ours, spent=NO_TIME) == replace(theirs, spent=NO_TIME)
        assert torch.equal(weights(compute), weights(again))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_peer_publishes_the_same_bytes(setup_of: MakeSetup, algorithm: str) -> None:
    compute = trained(setup_of(algorithm=algorithm))
    end_alone(compute)
    compute.step()
    again = saved_and_resumed(compute)
    assert close(compute, seq=2) == close(again, seq=2)


def test_a_checkpoint_holds_the_position_in_the_data(setup_of: MakeSetup) -> None:
    compute = trained(setup_of(), 5)
    again = saved_and_resumed(compute)
    assert again.counters.micro_batches == compute.counters.micro_batches == 5
    assert again.step().loss == compute.step().loss
    assert again.counters.tokens == compute.counters.tokens


def test_a_kill_between_close_and_merge_loses_no_progress(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of())
    start = weights(compute)
    for _ in range(3):
        compute.step()
    goal = weights(compute)
    for fragment in compute.fragments:
        close(compute, fragment.index)
    again = saved_and_resumed(compute)
    solo_windows(again, 25)
    phi = torch.cat([unpack(blockwise, layout, blob)["phi"] for _, layout, blob in export(again)])
    moved = torch.linalg.vector_norm(goal - start)
    assert torch.linalg.vector_norm(phi - goal) < 0.02 * moved
    assert torch.linalg.vector_norm(weights(again) - goal) < 0.02 * moved


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_merge_that_finds_no_memory_loses_no_progress(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    compute = trained(setup_of())
    goal = compute.gossip.of(0).live.theta.clone()
    close(compute)

    def full(*arguments: object) -> None:
        raise error("no memory")

    monkeypatch.setattr(TorchKernels, "merge", full)
    assert isinstance(compute.do(jobs.Merge(0, 1, ())), jobs.JobFailed)
    monkeypatch.undo()
    again = saved_and_resumed(compute)
    solo_windows(again, 25)
    _, layout, blob = export(again)[0]
    moved = torch.linalg.vector_norm(goal - Compute(compute.setup).gossip.of(0).live.theta)
    assert torch.linalg.vector_norm(unpack(blockwise, layout, blob)["phi"] - goal) < 0.02 * moved


def test_a_newcomer_of_a_resumed_peer_gets_what_was_trained_while_nobody_was_there(setup_of: MakeSetup) -> None:
    """Its slow weights are those of long ago, and so they must not be what is given or published."""
    compute = Compute(setup_of())
    compute.do(jobs.Start(newcomer=False))
    for fragment in compute.fragments:
        compute.do(jobs.Rest(fragment.index))
    for _ in range(3):
        compute.step()
    again = saved_and_resumed(compute)
    phi = torch.cat([unpack(blockwise, layout, blob)["phi"] for _, layout, blob in export(again)])
    torch.testing.assert_close(phi, weights(compute))
    assert close(saved_and_resumed(compute)).tokens == 0


def test_a_checkpoint_with_the_sums_of_learning_rates_of_wire_version_11_resumes(setup_of: MakeSetup) -> None:
    compute = trained(setup_of())
    compute.do(jobs.Rest(0))
    compute.do(jobs.Save())
    found = checkpoint.read(compute.setup.folder)
    assert found is not None
    tensors, facts = found
    old = [[tokens, 0.25, resting] for tokens, resting in facts["window"]]
    checkpoint.write(compute.setup.folder, tensors, {**facts, "window": old})
    again = Compute(compute.setup)
    assert again.resume()
    assert again.gossip.windows() == compute.gossip.windows() == [(one[0], one[2]) for one in old]
    assert {resting for _, resting in again.gossip.windows()} == {True, False}


def test_without_a_checkpoint_there_is_nothing_to_resume(setup_of: MakeSetup) -> None:
    compute = Compute(setup_of())
    before = weights(compute)
    assert not compute.resume()
    assert torch.equal(weights(compute), before)


def test_a_checkpoint_of_another_run_is_a_user_error(setup_of: MakeSetup) -> None:
    trained(setup_of()).do(jobs.Save())
    setup = setup_of()
    other = replace(setup, config=setup.config.model_copy(update={"seed": 8}))
    with pytest.raises(UserError, match="another run"):
        Compute(other).resume()


def test_a_checkpoint_of_other_shapes_is_a_user_error(setup_of: MakeSetup) -> None:
    """The user's own layers have changed since, under the same name."""
    compute = trained(setup_of())
    compute.do(jobs.Save())
    found = checkpoint.read(compute.setup.folder)
    assert found is not None
    tensors, facts = found
    checkpoint.write(compute.setup.folder, {name: tensor[:-1] for name, tensor in tensors.items()}, facts)
    with pytest.raises(UserError):
        Compute(compute.setup).resume()


def test_saving_reports_the_learning_rate_step_that_the_file_stores(setup_of: MakeSetup) -> None:
    """Not this peer's own steps, which are fewer in a swarm."""
    compute = trained(setup_of(), 3)
    compute.do(jobs.SetClock(100))
    saved = compute.do(jobs.Save())
    assert isinstance(saved, jobs.Saved)
    assert saved.lr_step == checkpoint.lr_step(compute.setup.folder) == 100


def test_saving_reports_the_size(setup_of: MakeSetup) -> None:
    compute = trained(setup_of(), 3)
    assert compute.do(jobs.Save()) == jobs.Saved(3, (compute.setup.folder / checkpoint.FILE).stat().st_size)


def test_a_folder_that_was_deleted_is_a_failed_job_and_training_goes_on(setup_of: MakeSetup, tmp_path: Path) -> None:
    compute = trained(replace(setup_of(), folder=tmp_path / "gone"))
    failed = compute.do(jobs.Save())
    assert isinstance(failed, jobs.SaveFailed)
    assert failed.said == f"none is left: the state folder {tmp_path / 'gone'} was deleted; stop this peer"
    assert compute.step().step == 4


def test_weights_that_have_diverged_are_a_failed_job(setup_of: MakeSetup) -> None:
    compute = trained(setup_of())
    compute.gossip.fragments[0].live.theta.fill_(float("nan"))
    failed = compute.do(jobs.CloseWindow(0, 1))
    assert isinstance(failed, jobs.JobFailed)
    assert "diverged" in failed.reason


# The thread


def outcomes(compute: Compute, before: Iterable[jobs.Job], steps: int = 0) -> list[str]:
    """The kinds of what the threads report, when these jobs wait for them and they may take so many steps."""
    for job in before:
        compute.submit(job)
    seen: list[str] = []

    def report(outcome: jobs.Outcome) -> None:
        seen.append(type(outcome).__name__)
        if seen.count("Stepped") == steps and not compute.threads.finishing:
            compute.submit(jobs.Finish())

    if steps == 0:
        compute.submit(jobs.Finish())
    compute.run(report)
    return seen


def test_the_thread_trains_while_no_job_waits(setup_of: MakeSetup) -> None:
    seen = outcomes(Compute(setup_of()), [jobs.Start(newcomer=False)], steps=3)
    assert seen == ["Started", "Stepped", "Stepped", "Stepped"]


def test_jobs_of_a_fragment_come_in_their_order_while_the_thread_trains(setup_of: MakeSetup) -> None:
    window: list[jobs.Job] = [jobs.CloseWindow(0, 1), jobs.EncodeSections(0, 1, ("phi.0",)), jobs.Merge(0, 1, ())]
    seen = outcomes(Compute(setup_of()), [jobs.Start(False), *window, jobs.Save()], steps=3)
    ours = ["WindowClosed", "SectionsEncoded", "Merged"]
    assert [kind for kind in seen if kind in ours] == ours
    assert seen.count("Saved") == 1
    assert seen.count("Stepped") == 3


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush denormals")
def test_the_training_thread_and_its_worker_treat_denormals_as_zero(setup_of: MakeSetup) -> None:
    """Processors compute with denormals up to a hundred times more slowly."""
    compute, products = Compute(setup_of()), dict[str, float]()

    def report(outcome: jobs.Outcome) -> None:
        products[threading.current_thread().name] = float(torch.tensor([1e-30]) * 1e-10)

    for job in (jobs.Start(newcomer=False), jobs.CloseWindow(0, 1), jobs.EncodeSections(0, 1, ("phi.0",))):
        compute.submit(job)
    compute.submit(jobs.Finish())
    thread = threading.Thread(target=compute.run, args=(report,), name="compute")
    thread.start()
    thread.join()
    assert products == {"compute": 0.0, "beside": 0.0}


def test_the_thread_does_not_train_before_it_is_told_to_start(setup_of: MakeSetup) -> None:
    assert outcomes(Compute(setup_of()), [jobs.Evaluate(), jobs.Evaluate()]) == ["Evaluated", "Evaluated"]


def test_a_held_window_waits_for_its_merge(setup_of: MakeSetup) -> None:
    hold: list[jobs.Job] = [jobs.Start(False), jobs.CloseWindow(0, 1, blocking=True)]
    assert outcomes(Compute(setup_of(algorithm="allreduce")), hold) == ["Started", "WindowClosed"]
    merged = outcomes(Compute(setup_of(algorithm="allreduce")), [*hold, jobs.Merge(0, 1, ())], steps=1)
    assert merged == ["Started", "WindowClosed", "Merged", "Stepped"]


def test_the_time_of_a_peer_that_begins_again_is_accounted_for(setup_of: MakeSetup) -> None:
    compute, now = Compute(setup_of()), [0.0]
    account = compute.counters.time = TimeAccount(lambda: now[0])
    for seconds, kind in ((5.0, "state"), (3.0, "waiting")):  # until it has joined, and while it fetches again
        now[0] += seconds
        account.spent_on(kind)
        compute.do(jobs.Start(newcomer=False))
    spent = compute.step().spent
    assert (spent.state, spent.waiting) == (0.0, 3.0)


def test_the_processor_time_of_training_is_known_after_its_thread_has_ended(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Compute(setup_of())
    outcomes(compute, [jobs.Start(newcomer=False)], steps=1)

    def gone(clock: int) -> float:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(time, "clock_gettime", gone)
    assert compute.training_s() > 0


def test_what_a_throttled_peer_computes_counts_no_more_than_the_time_that_has_passed(
    setup_of: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking a newcomer's state is not throttled, so ten times its processor time would be more than all cores."""
    setup = setup_of()
    compute = Compute(replace(setup, device=replace(setup.device, throttle=10.0)))
    clock_s, used_s = 100.0, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock_s)
    compute._clock = lambda: used_s
    before_s = compute.training_s()
    clock_s, used_s = 105.0, 2.0
    assert compute.training_s() - before_s == pytest.approx(5.0 * torch.get_num_threads())
    clock_s, used_s = 110.0, 2.25
    assert compute.training_s() - before_s == pytest.approx(7.5 * torch.get_num_threads())


def test_training_waits_for_the_merges_of_all_held_windows(setup_of: MakeSetup) -> None:
    """A merge that came after a step would put its mean in the place of what the step trained."""
    hold: list[jobs.Job] = [
        jobs.Start(False),
        jobs.CloseWindow(0, 1, blocking=True),
        jobs.CloseWindow(1, 1, blocking=True),
    ]
    setup = setup_of(algorithm="allreduce")
    compute = Compute(setup)
    for job in [*hold, jobs.Merge(1, 1, ())]:
        compute.do(job)
    assert compute.waits
    seen = outcomes(Compute(setup), [*hold, jobs.Merge(1, 1, ()), jobs.Merge(0, 1, ())], steps=1)
    assert (seen.count("Merged"), seen[-1]) == (2, "Stepped")


def test_a_failed_job_does_not_end_the_thread(setup_of: MakeSetup, tmp_path: Path) -> None:
    compute = Compute(replace(setup_of(), folder=tmp_path / "gone"))
    seen = outcomes(compute, [jobs.Start(False), jobs.Save()], steps=1)
    assert sorted(seen) == ["SaveFailed", "Started", "Stepped"], "the step does not wait for the checkpoint"


def test_a_merge_beside_training_counts_the_step_that_ends_before_its_correction(setup_of: MakeSetup) -> None:
    """A late correction is taken in part (rho), and a step is under way while the worker merges."""
    compute = Compute(setup_of())
    seen: list[int] = []

    def report(outcome: jobs.Outcome) -> None:
        if isinstance(outcome, jobs.Stepped):
            seen.append(compute.gossip.steps_to_edge())
            compute.submit(jobs.Finish())

    assert compute.gossip.steps_to_edge() == 0, "without threads a merge is at an edge"
    compute.submit(jobs.Start(newcomer=False))
    compute.run(report)
    assert seen[0] == 1
