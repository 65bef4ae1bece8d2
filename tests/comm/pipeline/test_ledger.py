"""A sum of gradients counts when all in it are committed, and not at all when one is aborted."""

import pytest

from decentral.comm.pipeline.forwarding import reaches_the_end
from decentral.comm.pipeline.ledger import CommitState, GradientEntry, GradientLedger
from decentral.comm.wire.messages import ExecutionId, Hop
from decentral.comm.wire.transport import Effect
from decentral.core.jobs import Apply, Drop, Forward, Seal, Undo
from decentral.core.journal.events import CountedLine, UncountedLine
from decentral.core.journal.field_kinds import CountedExecution
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.machine import Log


def entry(number: int, own: bool = False, undo: Undo | None = None) -> GradientEntry:
    return GradientEntry(ExecutionId("A", number, 0), 2, 10, 20.0, own, undo)


def undo(local_id: int) -> Undo:
    return Undo(Forward(local_id, 0, 2, 1, (), b""))


def kinds(effects: list[Effect]) -> list[str]:
    return [
        JOURNAL_LINES.name(effect.event) if isinstance(effect, Log) else type(effect).__name__ for effect in effects
    ]


def lines(effects: list[Effect]) -> list[CountedLine | UncountedLine]:
    told = [effect.event for effect in effects if isinstance(effect, Log)]
    return [line for line in told if isinstance(line, CountedLine | UncountedLine)]


def test_a_committed_sum_is_applied_and_named_in_the_journal() -> None:
    ledger = GradientLedger(1)
    assert ledger.add(1, entry(7, own=True), CommitState.IN_DOUBT) == [Seal()]
    assert ledger.sealed((1,)) == []
    counted = CountedLine(of=(CountedExecution("A", 7, 0, 2, 10),))
    assert ledger.commit(1) == [Apply(10, 1, 2.0), Log(counted)]


def test_an_aborted_one_takes_the_sum_with_it_and_what_comes_later_is_too_late() -> None:
    ledger = GradientLedger(1)
    ledger.add(1, entry(1), CommitState.IN_DOUBT)
    ledger.add(2, entry(2), CommitState.IN_DOUBT)
    ledger.sealed((1, 2))
    assert kinds(ledger.commit(1)) == []
    aborted = ledger.abort(2)
    assert kinds(aborted) == ["Drop", "uncounted"]
    assert len(lines(aborted)[0].of) == 2
    assert ledger.commit(2) == []


def test_gradients_that_can_be_taken_out_are_and_the_others_count() -> None:
    ledger = GradientLedger(2)
    for local_id in (1, 2, 3):
        assert ledger.add(local_id, entry(local_id, undo=undo(local_id)), CommitState.IN_DOUBT) == []
    assert ledger.commit(1) == []
    assert ledger.abort(2) == [undo(2)]
    assert ledger.commit(3) == []  # the step waits until the second one's gradients are out
    out = ledger.undone(2, True)
    assert kinds(out) == ["uncounted", "Seal"]
    assert lines(out) == [UncountedLine(of=(entry(2).counted(),), void=1)]
    assert out[1] == Seal((1, 3), Apply(0, 0, 2.0))
    assert kinds(ledger.sealed_and_applied((1, 3))) == ["counted"]


def test_gradients_are_taken_out_between_passes_only_and_are_not_enough_for_a_step() -> None:
    ledger = GradientLedger(1, quiet=False)
    ledger.add(1, entry(1, undo=undo(1)), CommitState.IN_DOUBT)
    assert ledger.waiting()
    assert ledger.abort(1) == []
    assert not ledger.waiting()
    ledger.quiet = True
    assert ledger.due_jobs() == [undo(1)]
    assert ledger.due_jobs() == []


def test_gradients_that_could_not_be_taken_out_drop_the_sum() -> None:
    ledger = GradientLedger(1)
    ledger.add(1, entry(1, undo=undo(1)), CommitState.ABORTED)
    ledger.add(2, entry(2, undo=undo(2)), CommitState.COMMITTED)
    assert ledger.undone(1, False) == [Seal()]
    assert kinds(ledger.sealed((1, 2))) == ["Drop", "uncounted"]


def test_a_decision_is_final() -> None:
    ledger = GradientLedger(1)
    ledger.add(1, entry(1), CommitState.IN_DOUBT)
    ledger.abort(1)
    ledger.commit(1)
    assert kinds(ledger.sealed((1,))) == ["Drop", "uncounted"]


def test_later_gradients_go_into_the_next_sum_while_one_waits() -> None:
    ledger = GradientLedger(1)
    ledger.add(1, entry(1), CommitState.IN_DOUBT)
    ledger.sealed((1,))
    assert ledger.add(2, entry(2), CommitState.COMMITTED) == []
    assert kinds(ledger.commit(1)) == ["Apply", "counted", "Seal"]
    assert kinds(ledger.sealed((2,))) == ["Apply", "counted"]


def test_a_sum_that_is_committed_already_is_sealed_and_applied_in_one() -> None:
    ledger = GradientLedger(1)
    assert ledger.add(1, entry(1, own=True), CommitState.COMMITTED) == [Seal((1,), Apply(10, 1, 2.0))]
    assert kinds(ledger.sealed_and_applied((1,))) == ["counted"]
    assert not ledger.entries


def test_a_step_waits_for_as_many_micro_batches_as_the_config_says() -> None:
    ledger = GradientLedger(3)
    assert [kinds(ledger.add(n, entry(n), CommitState.COMMITTED)) for n in range(3)] == [[], [], ["Seal"]]


def test_what_was_sealed_is_applied_even_if_nothing_else_comes() -> None:
    ledger = GradientLedger(1)
    ledger.add(1, entry(1), CommitState.COMMITTED)
    assert ledger.sealed((1,))[0] == Apply(0, 0, 2.0)
    assert not ledger.entries
    assert Drop() not in ledger.sealed(())


def test_sums_wait_side_by_side_and_an_aborted_one_takes_only_its_own_with_it() -> None:
    ledger = GradientLedger(1, slots=2)
    assert ledger.add(1, entry(1), CommitState.IN_DOUBT) == [Seal(slot=0)]
    ledger.sealed((1,), 0)
    assert ledger.add(2, entry(2), CommitState.IN_DOUBT) == [Seal(slot=1)]
    ledger.sealed((2,), 1)
    dropped, applied = ledger.abort(1), ledger.commit(2)
    assert dropped[0] == Drop(0)
    assert applied[0] == Apply(0, 0, 2.0, slot=1)
    assert (kinds(dropped)[1], kinds(applied)[1]) == ("uncounted", "counted")
    assert [len(line.of) for line in lines(dropped + applied)] == [1, 1]


def test_the_journal_names_steps_in_the_order_in_which_they_are_taken() -> None:
    ledger = GradientLedger(1, slots=2)
    ledger.add(1, entry(1), CommitState.IN_DOUBT)
    ledger.sealed((1,), 0)
    assert kinds(ledger.add(2, entry(2), CommitState.COMMITTED)) == ["Seal"]  # its step is taken at once
    assert ledger.commit(1) == []
    taken = ledger.sealed_and_applied((2,))
    assert taken[1] == Apply(0, 0, 2.0, slot=0)
    assert [line.of[0].number for line in lines(taken)] == [2, 1]


def test_what_waits_is_spread_evenly_over_the_slots() -> None:
    ledger = GradientLedger(1, slots=2)
    ledger.add(1, entry(1), CommitState.IN_DOUBT)
    ledger.sealed((1,), 0)
    ledger.quiet = False
    for number in range(2, 5):
        ledger.add(number, entry(number), CommitState.IN_DOUBT)
    ledger.quiet = True
    assert kinds(ledger.due_jobs()) == ["Seal"]  # four wait: two of them, at least, in the second sum
    ledger.sealed((2, 3, 4), 1)
    assert kinds(ledger.commit(1)) == ["Apply", "counted"]
    assert ledger.add(5, entry(5), CommitState.IN_DOUBT) == []  # of four the slots have three already
    assert ledger.add(6, entry(6), CommitState.IN_DOUBT) == [Seal(slot=0)]


@pytest.mark.parametrize(
    ("hops", "whole"),
    [
        ([(2, 3), (3, 5)], True),
        ([(2, 5)], True),
        ([(2, 4)], False),
        ([(2, 3), (4, 5)], False),
        ([(1, 5)], False),
        ([(2, 4), (3, 5)], False),
        ([], False),
    ],
)
def test_hops_reach_the_end_without_a_gap(hops: list[tuple[int, int]], whole: bool) -> None:
    assert reaches_the_end(tuple(Hop("X", *hop) for hop in hops), 2, 5) is whole


@pytest.mark.parametrize("state", CommitState)
def test_a_sum_that_no_step_can_take_counts_for_nothing_whatever_its_origin_peers_decide(state: CommitState) -> None:
    ledger = GradientLedger(2)
    ledger.add(1, entry(1), CommitState.COMMITTED)
    ledger.add(2, entry(2), state)
    dropped = ledger.sealed((1, 2), sound=False)
    assert kinds(dropped) == ["Drop", "uncounted"]
    of = tuple(entry(number).counted() for number in (1, 2))
    assert lines(dropped) == [UncountedLine(of=of, void=0, reason="nan")]
    assert not ledger.entries
    assert ledger.commit(2) == []
