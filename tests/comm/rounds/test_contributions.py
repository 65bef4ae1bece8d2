"""The reports of a round say together whose gradients count, and who is in the next round."""

from dataclasses import replace

import pytest

from decentral.comm.pipeline.ledger import CommitState, GradientEntry
from decentral.comm.rounds import contributions, members
from decentral.comm.wire.messages import CompletedMicroBatch, ExecutionId, Hop, RoundMember, RoundReport, Snapshot
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Fragment, Section
from decentral.core.ids import PeerId

CUTS = tuple(Fragment(index, index, index + 1, 100) for index in range(4))
A, B, C = RoundMember("A", 0, 2), RoundMember("B", 1, 4), RoundMember("C", 0, 3)
MEMBERS = (A, B, C)


def report(
    own: RoundMember,
    *micro_batches: CompletedMicroBatch,
    newcomers: tuple[RoundMember, ...] = (),
    version: bytes = b"v",
) -> RoundReport:
    versions = (version * 16,) * (own.last - own.first)
    return RoundReport("run", 7, own, micro_batches, 2.0 * len(micro_batches), newcomers, versions)


def reports(*given: RoundReport) -> dict[PeerId, RoundReport]:
    return {PeerId(one.own.peer): one for one in given}


BY_A = report(A, CompletedMicroBatch(5, 10, (0, 1), (1, 4)), CompletedMicroBatch(6, 20, (0, 1), (2, 4)))


def test_micro_batches_are_divided_over_those_that_hold_layer_0_and_the_odd_one_goes_round() -> None:
    shares = [[members.micro_batch_quota(MEMBERS, PeerId(peer), round, 5) for peer in "ABC"] for round in range(2)]
    assert sorted(shares) == [[2, 0, 3], [3, 0, 2]]


def test_a_hop_counts_in_the_fragments_between_its_ends() -> None:
    found = contributions.count_contributions(MEMBERS, reports(BY_A, report(B)), PeerId("B"), CUTS)
    assert found.executions == {ExecutionId("A", 5, 1), ExecutionId("A", 6, 2)}
    tokens = {(peer, fragment): count for (peer, fragment), count in found.tokens.items()}
    assert tokens == {("A", 0): 30, ("A", 1): 20, ("B", 1): 10, ("B", 2): 30, ("B", 3): 30}
    assert found.loss == pytest.approx(4.0 / 30)


def test_a_sum_that_has_an_execution_twice_is_not_one_that_the_reports_name() -> None:
    """It was given up while the training thread had it, and came again. Whoever closes the sum wants all named."""
    record, twice, once = contributions.ContributionRecord(), ExecutionId("A", 5, 1), ExecutionId("A", 6, 2)
    record.add(1, GradientEntry(twice, 4, 10, 20.0, False), CommitState.ABORTED)
    record.add(2, GradientEntry(once, 4, 20, 40.0, False), CommitState.IN_DOUBT)
    assert set(record.named({twice, once})) == {1, 2}
    record.add(3, GradientEntry(twice, 4, 10, 20.0, False), CommitState.IN_DOUBT)
    assert len(record.named({twice, once})) == 2


def test_every_layer_sees_all_tokens_once() -> None:
    by_c = report(C, CompletedMicroBatch(1, 7, (2, 1), (3, 4)))
    found = contributions.count_contributions(MEMBERS, reports(BY_A, report(B), by_c), PeerId("A"), CUTS)
    for fragment in range(4):
        assert sum(count for (_, index), count in found.tokens.items() if index == fragment) == 37


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ({"own": B}, "origin"),
        ({"own": replace(A, last=9)}, "span"),
        ({"newcomers": (RoundMember("N", 3, 3),)}, "span"),
        ({"versions": ()}, "versions"),
        ({"micro_batches": (CompletedMicroBatch(5, 10, (0, 1), (2, 3)),)}, "hops"),  # not to the end
        ({"micro_batches": (CompletedMicroBatch(5, 10, (0, 1), (2, 2)),)}, "hops"),
        ({"micro_batches": (CompletedMicroBatch(5, 10, (0, 1, 1), (2, 4)),)}, "hops"),
        ({"micro_batches": (CompletedMicroBatch(5, 10, (0, 9), (2, 4)),)}, "hops"),  # no such member
        ({"micro_batches": (CompletedMicroBatch(5, 10, (0, 1), (3, 4)),)}, "hops"),  # a layer that A does not hold
        ({"micro_batches": (CompletedMicroBatch(5, 10, (2, 1), (2, 4)),)}, "hops"),  # begun by C
        ({"micro_batches": (CompletedMicroBatch(5, 10, (0, 1), (2, 4)),) * 2}, "number"),
    ],
)
def test_a_report_that_cannot_be_is_refused(flaw: dict[str, object], reason: str) -> None:
    contributions.check_report(BY_A, MEMBERS, PeerId("A"), CUTS)
    with pytest.raises(ProtocolError) as caught:
        contributions.check_report(replace(BY_A, **flaw), MEMBERS, PeerId("A"), CUTS)  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_peers_that_reported_or_were_let_in_are_in_the_next_round() -> None:
    newcomer, back = RoundMember("N", 2, 4), RoundMember("C", 1, 4)
    by_b = report(B, newcomers=(newcomer, back))
    assert members.next_members(reports(BY_A, by_b)) == (A, B, back, newcomer)


def test_two_reports_that_differ_about_a_newcomer_give_it_one_span() -> None:
    one, other = RoundMember("N", 0, 2), RoundMember("N", 2, 4)
    given = [replace(BY_A, newcomers=(one,)), report(B, newcomers=(other,))]
    assert members.next_members(reports(*given)) == members.next_members(reports(*given[::-1]))
    assert one in members.next_members(reports(*given))


def test_most_holders_decide_which_version_is_right_and_in_a_tie_the_lowest_peer() -> None:
    other = report(B, version=b"w")
    found = contributions.majority_versions(reports(report(A), other, report(C)), CUTS)
    assert [found[index][:1] for index in range(4)] == [b"v", b"v", b"w", b"w"]
    assert contributions.majority_versions(reports(report(A), other), CUTS)[1][:1] == b"v"


def test_a_version_depends_on_the_peers_in_a_step_and_not_on_their_order() -> None:
    first = contributions.first_version("run", 0, 7)
    sums = [(PeerId("A"), b"x" * 16), (PeerId("B"), b"y" * 16)]
    assert contributions.next_version(first, sums) == contributions.next_version(first, sums[::-1])
    assert len({first, contributions.next_version(first, sums), contributions.next_version(first, sums[:1])}) == 3


LAYOUT = (Section("gradient", "fp32", 100, 400),)
EXPECTED = Snapshot("run", 2, 7, 0, 0.0, LAYOUT, b"")


@pytest.mark.parametrize(
    ("flaw", "size", "reason"),
    [
        ({}, 399, "shape"),
        ({"tokens": 31}, 400, "unexpected"),
        ({"seq": 6}, 400, "unexpected"),
        ({"fragment": 1}, 400, "unexpected"),
        ({"tokens": 0}, 400, "shape"),
        ({"layout": ()}, 0, "shape"),
    ],
)
def test_a_sum_of_something_else_is_refused(flaw: dict[str, object], size: int, reason: str) -> None:
    good = replace(EXPECTED, tokens=30)
    contributions.check_sum(good, 400, 30, EXPECTED)
    contributions.check_sum(replace(good, tokens=0, layout=()), 0, 30, EXPECTED)
    with pytest.raises(ProtocolError) as caught:
        contributions.check_sum(replace(good, **flaw), size, 30, EXPECTED)  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_of_two_rounds_the_one_that_can_train_goes_on_then_the_later_then_the_larger() -> None:
    whole = (A, B)
    assert members.precedence(1, whole, 4) > members.precedence(9, (A, C), 4)
    assert members.precedence(9, (A,), 4) > members.precedence(1, (A, C), 4)
    assert members.precedence(1, MEMBERS, 4) > members.precedence(9, whole, 4)
    assert members.precedence(1, whole, 4) > members.precedence(1, (B, C), 4)


@pytest.mark.parametrize(
    "hops",
    [
        (Hop("B", 2, 3), Hop("C", 3, 4)),  # C does not hold the last layer
        (Hop("B", 2, 3), Hop("nobody", 3, 4)),
        (Hop("A", 1, 4),),  # A holds no more than two layers
    ],
)
def test_hops_that_others_would_not_believe_are_not_taken_and_never_reported(hops: tuple[Hop, ...]) -> None:
    """One micro-batch with such hops made the whole report of the honest origin peer invalid."""
    record = contributions.ContributionRecord()
    record.begin(MEMBERS, CUTS)
    good = (Hop("B", 2, 4),)
    for local_id, way in ((1, good), (2, hops)):
        record.completed(local_id, way)
        record.add(local_id, GradientEntry(ExecutionId("A", local_id, 0), 2, 64, 1.0, True), CommitState.COMMITTED)
    done, loss = record.completed_micro_batches(MEMBERS, PeerId("A"), CUTS)
    contributions.check_report(replace(report(A, *done), loss=loss), MEMBERS, PeerId("A"), CUTS)
    assert ([one.number for one in done], loss) == ([1], 1.0)
    assert record.accepts(good, 1.0, 64)
    assert not record.accepts(hops, 1.0, 64)


def test_a_fragment_is_not_cut_by_a_hop() -> None:
    record = contributions.ContributionRecord()
    record.begin(MEMBERS, (Fragment(0, 0, 2, 100), Fragment(1, 2, 4, 100)))
    assert record.accepts((Hop("B", 2, 4),), 1.0, 64)
    assert not record.accepts((Hop("C", 0, 3),), 1.0, 64)


def test_a_loss_that_no_report_can_carry_is_not_believed() -> None:
    """Two answers with a loss of 9e17 made a report that nobody could read."""
    record = contributions.ContributionRecord()
    record.begin(MEMBERS, CUTS)
    assert not record.accepts((Hop("B", 2, 4),), 9e17, 64)
