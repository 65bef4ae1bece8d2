"""The sums of a peer's journal, of one life and of all."""

from typing import Any

from decentral.core.journal.peer_totals import MOST_LIVES, PeerTotals
from decentral.core.time_spent import TimeSpent


def line(t: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": event, **fields}


def step(t: float, number: int, **fields: Any) -> dict[str, Any]:
    return line(t, "step", step=number, tokens=100, micro_batches=2, loss=2.0, seconds=0.75, **fields)


def life(t: float, **sent: int) -> list[dict[str, Any]]:
    exchanges = [line(t + 2, "exchange", outcome="done"), line(t + 2, "exchange", outcome="failed", reason="deadline")]
    traffic = line(t + 3, "traffic", sent_bytes=sent.get("sent", 7), received_bytes=9)
    return [line(t, "started", peer="A"), line(t + 1, "joined"), step(t + 2, 1), *exchanges, traffic]


def test_a_life_has_its_own_sums_and_all_lives_have_theirs() -> None:
    totals = PeerTotals.of([*life(0.0), line(4.0, "stopped", reason="interrupted"), *life(10.0)])
    assert [(one.began, one.joined, one.last, one.ended) for one in totals.lives] == [
        (0.0, 1.0, 4.0, "interrupted"),
        (10.0, 11.0, 13.0, ""),
    ]
    assert (totals.work.tokens, totals.whole.tokens, totals.tokens) == (100, 200, 200)
    assert (totals.work.sent_bytes, totals.whole.sent_bytes, totals.whole.received_bytes) == (7, 14, 18)
    assert totals.whole.exchanges.outcomes == {"done": 2, "failed": 2}
    assert totals.work.exchanges.reasons == {"deadline": 1}


def test_a_file_that_goes_on_with_a_life_begins_none() -> None:
    totals = PeerTotals.of(
        [line(5.0, "continued", peer="A"), step(6.0, 8), line(7.0, "continued", peer="A"), step(8.0, 9)]
    )
    assert (totals.starts, totals.work.tokens, totals.work.step, totals.facts.peer) == (1, 200, 9, "A")


def test_the_time_of_the_training_thread_is_known_by_its_kinds() -> None:
    totals = PeerTotals.of([step(1.0, 1, aside={"gossip": 0.25, "beside": 0.1, "a newer kind": 3.0}), step(2.0, 2)])
    assert totals.work.spent == TimeSpent(training=1.5, gossip=0.25, beside=0.1)


def test_reasons_that_partners_make_up_do_not_add_up() -> None:
    failed = [line(1.0, "exchange", outcome="failed", reason=f"word-{number}") for number in range(100)]
    assert PeerTotals.of(failed).work.exchanges.failures == {"other": 100}


def test_of_many_lives_the_oldest_count_as_one() -> None:
    totals = PeerTotals.of(one for number in range(MOST_LIVES + 50) for one in life(10.0 * number))
    assert (len(totals.lives), totals.starts) == (MOST_LIVES, MOST_LIVES + 50)
    assert (totals.lives[0].began, totals.lives[-1].last) == (0.0, 10.0 * (MOST_LIVES + 49) + 3)
    assert totals.tokens == 100 * (MOST_LIVES + 50)


def test_the_last_loss_is_that_of_the_last_line_also_where_none_was_finite() -> None:
    assert PeerTotals.of([step(1.0, 1), step(2.0, 2) | {"loss": None}]).work.loss is None
