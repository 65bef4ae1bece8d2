"""The benchmark of eclipses reads from journals when each peer's roster had each other peer."""

from benchmarks.hostile_eclipse import delays, plans
from decentral.core.strict_json import JsonObject


def line(t: float, event: str, peer: str) -> JsonObject:
    return {"t": t, "event": event, "peer": peer}


def test_a_delay_counts_from_the_start_of_the_later_peer() -> None:
    early = [line(10.0, "started", "a"), line(25.5, "peer_joined", "b")]
    late = [line(20.0, "started", "b"), line(21.0, "peer_joined", "a")]
    assert delays({1: early, 2: late}) == {(1, 2): 5.5, (2, 1): 1.0}


def test_a_peer_that_was_dropped_and_found_again_was_late() -> None:
    seen = [line(1.0, "peer_joined", "b"), line(40.0, "peer_left", "b"), line(70.0, "peer_joined", "b")]
    found = delays({1: [line(0.0, "started", "a"), *seen], 2: [line(0.0, "started", "b")]})
    assert found == {(1, 2): 70.0, (2, 1): None}


def test_a_peer_that_was_dropped_is_missing() -> None:
    seen = [line(1.0, "peer_joined", "b"), line(40.0, "peer_left", "b")]
    assert delays({1: [line(0.0, "started", "a"), *seen], 2: [line(0.0, "started", "b")]})[1, 2] is None


def test_a_plan_spreads_from_the_first_peer_that_adopts_it_to_the_last() -> None:
    def adopts(t: float, digest: str) -> JsonObject:
        return {"t": t, "event": "plan", "digest": digest}

    journals = {1: [adopts(5.0, "x"), adopts(9.0, "y")], 2: [adopts(6.5, "x")], 3: [line(0.0, "started", "c")]}
    assert plans(journals) == [{"by": 2, "of": 3, "last_s": 1.5}, {"by": 1, "of": 3, "last_s": 0.0}]
