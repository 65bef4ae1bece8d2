"""What is wrong: said while it is, in words that name it, and not for ever."""

from decentral.core.journal.events import BAD, PLAIN, WARNING
from decentral.core.time_spent import TimeSpent
from decentral.view.page.peer_view import PageState, PeerView
from decentral.view.page.problems import PROBLEMS_SHOWN, RecentTroubles, RunKind


def peer(number: int, state: PageState = PageState.TRAINING, since: float = 0.0) -> PeerView:
    return PeerView(number, f"peer{number}", state, since=since, own=True)


def exchanging(number: int) -> PeerView:
    found = peer(number)
    found.work.exchanges.ended["done", ""] = 1
    return found


def test_of_a_swarm_that_is_well_nothing_is_said() -> None:
    assert RecentTroubles().problems([exchanging(0), exchanging(1)], now=100.0) == []


def test_exchanges_that_fail_often_are_a_problem_with_their_reasons() -> None:
    troubles = RecentTroubles()
    for number in range(60):
        troubles.exchanged(50.0, "failed" if number % 2 else "done", "deadline" if number % 4 == 1 else "cut")
    (found,) = troubles.problems([exchanging(0)], now=100.0)
    assert found == (WARNING, -1, "30 of the last 60 exchanges failed: deadline 15, cut 15")
    assert troubles.problems([exchanging(0)], now=1000.0) == []


def test_a_few_exchanges_that_fail_say_nothing() -> None:
    troubles = RecentTroubles()
    for _ in range(5):
        troubles.exchanged(50.0, "failed", "deadline")
    assert troubles.problems([exchanging(0)], now=100.0) == []


def test_a_peer_that_trains_beside_others_and_exchanges_nothing_is_named() -> None:
    alone = peer(1)
    alone.work.exchanges.ended["failed", "stranger"] = 4
    (found,) = RecentTroubles().problems([exchanging(0), alone], now=100.0)
    assert found == (WARNING, 1, "has not exchanged anything since it joined (stranger)")
    assert RecentTroubles().problems([alone], now=100.0) == []  # there is nobody else


def test_a_peer_that_trains_little_is_named_with_what_holds_it_up() -> None:
    slow = exchanging(0)
    slow.work.spent = TimeSpent(training=20.0, checkpoint=70.0, waiting=10.0)
    (found,) = RecentTroubles().problems([slow], now=100.0)
    assert found == (WARNING, 0, "trains 20% of the time; checkpoint takes most of the rest")


def test_serious_events_are_problems_once_each_and_first() -> None:
    troubles = RecentTroubles()
    for _ in range(3):
        troubles.told(90.0, 0, WARNING, "was stopped for 20 s")
        troubles.told(90.0, 1, BAD, "no peer holds layer 3")
    troubles.told(90.0, 1, PLAIN, "starts on cpu")
    found = troubles.problems([exchanging(0), exchanging(1)], now=100.0)
    assert found == [(BAD, 1, "no peer holds layer 3"), (WARNING, 0, "was stopped for 20 s")]


def holding(number: int, first: int, last: int) -> PeerView:
    found = exchanging(number)
    found.device.first, found.device.last = first, last
    return found


def test_layers_without_a_holder_are_a_problem_while_the_table_shows_none() -> None:
    troubles = RecentTroubles()
    troubles.unheld(0, range(4, 6), "no peer that trains holds layers 4 to 5")
    lacking = [holding(0, 0, 4), holding(1, 5, 8)]
    assert troubles.problems(lacking, now=1000.0) == [(BAD, -1, "no peer that trains holds layers 4 to 5")]
    assert troubles.problems([*lacking, holding(2, 3, 5)], now=1000.0) == []
    joining = holding(2, 3, 5)
    joining.state = PageState.JOINING
    assert len(troubles.problems([*lacking, joining], now=1000.0)) == 1
    troubles.held(0)
    assert troubles.problems(lacking, now=1000.0) == []


def test_with_long_windows_a_peer_may_be_without_an_exchange_for_some_of_them() -> None:
    alone = peer(1)
    alone.network.window_s = 128.0
    assert RecentTroubles().problems([exchanging(0), alone], now=300.0) == []
    assert len(RecentTroubles().problems([exchanging(0), alone], now=400.0)) == 1


def test_peers_without_a_common_layer_and_those_of_rounds_have_nothing_to_exchange() -> None:
    one, other = holding(0, 0, 4), holding(1, 4, 8)
    one.work.exchanges.ended.clear()
    other.work.exchanges.ended.clear()
    assert RecentTroubles().problems([one, other], now=100.0) == []
    assert len(RecentTroubles().problems([one, other, holding(2, 2, 6)], now=100.0)) == 2
    both = [peer(0), peer(1)]
    assert RecentTroubles().problems(both, now=100.0, run=RunKind(8, synchronous=True)) == []


def test_a_peer_that_waits_for_others_as_its_run_wants_is_not_idle() -> None:
    part = holding(0, 0, 4)
    part.work.spent = TimeSpent(training=30.0, waiting=70.0)
    assert RecentTroubles().problems([part], now=100.0, run=RunKind(8)) == []
    assert len(RecentTroubles().problems([part], now=100.0, run=RunKind(4))) == 1
    part.work.spent = TimeSpent(training=10.0, checkpoint=20.0, waiting=70.0)
    (found,) = RecentTroubles().problems([part], now=100.0, run=RunKind(8))
    assert found == (WARNING, 0, "trains 10% of the time; checkpoint takes most of the rest")


def test_the_list_is_bounded() -> None:
    troubles = RecentTroubles()
    for number in range(100):
        troubles.told(90.0, number, BAD, f"error {number}")
    assert len(troubles.problems([exchanging(0)], now=100.0)) == PROBLEMS_SHOWN
