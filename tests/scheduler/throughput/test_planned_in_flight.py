"""Micro-batches in flight limit what routes carry: cases computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from decentral.core import config
from decentral.scheduler.throughput import max_flow, planned_in_flight, planning
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.planned_in_flight import BESIDE_STEPS, JOBS_S, Flights, Pipeline
from decentral.scheduler.throughput.span_search import FlowProblem

SPANS = [(0, 1), (1, 2)]
ROUTE = [(0, 0, 1), (1, 1, 2)]
PASSES_S = 0.1 + JOBS_S  # of a sequence in a layer
DELAY_NN = np.full((2, 2), 0.05)


def pair(memory_bytes: float = 1000.0) -> Pipeline:
    """Two peers with a layer each, which takes 0.1 s a sequence of ten tokens, 500 bytes, and 100 bytes a sequence.

    A sequence takes 0.1 s in each direction over the link, and 0.05 s of delay.
    """
    seconds, ones, free = np.full((2, 2), 0.01), np.ones(2), np.full(2, np.inf)
    memory, link = np.full(2, memory_bytes), np.array([[0.0, 1e4], [1e4, 0.0]])
    costs = LayerCosts(
        seconds, 500 * ones, ones, 100 * ones, ones, memory, link, 100.0, 1, free, np.full(2, -1), np.zeros(0)
    )
    return Pipeline(costs, DELAY_NN, context=10, sequences=1)


def trio() -> Pipeline:
    """The peers of `pair`, and another like the first."""
    two = pair()
    link = np.full((3, 3), 1e4) - 1e4 * np.eye(3)
    costs = replace(two.costs.of_peers(np.array([0, 1, 0])), link_NN=link)
    return replace(two, costs=costs, delay_NN=np.full((3, 3), 0.05))


def test_a_peer_keeps_a_micro_batch_until_all_later_peers_and_links_are_done() -> None:
    """Another micro-batch waits as long as it computes; activations and gradient take 0.3 s on the link."""
    assert pair().kept_s(ROUTE) == pytest.approx([4 * PASSES_S + 0.3, 2 * PASSES_S])
    assert pair().kept_s(ROUTE, waiting=0.0) == pytest.approx([2 * PASSES_S + 0.3, PASSES_S])
    two = replace(pair(), sequences=2).kept_s(ROUTE, waiting=0.0)
    assert two == pytest.approx([2 * (PASSES_S + 0.1) + 0.5, PASSES_S + 0.1])


def test_a_transfer_over_a_far_link_begins_slowly() -> None:
    """Two megabytes take seven round trips of 0.2 s, until 14 kB have become as many as are left."""
    costs = replace(pair().costs, link_NN=np.full((2, 2), 1e9), hidden_bytes=2e5)
    far = Pipeline(costs, np.full((2, 2), 0.1), context=10, sequences=1)
    assert far.link_s(0, 1) == pytest.approx(0.2 + 2 * 7 * 0.2, rel=0.01)


def test_activations_wait_for_the_gossip_that_the_links_carry() -> None:
    """Both peers have 10 kB/s for all their links, and gossip about a layer takes 2 kB/s of these."""
    thin = replace(pair().costs, rate_N=np.full(2, 1e4), snapshot_L=np.full(2, 2e3), link_share=0.5)
    slower_s = 2 * 1000 / 8e3 - 2 * 1000 / 1e4
    assert replace(pair(), costs=thin).kept_s(ROUTE)[0] == pytest.approx(pair().kept_s(ROUTE)[0] + slower_s, abs=1e-3)


def test_memory_for_five_micro_batches_carries_five_in_the_time_of_one() -> None:
    kept_s = 4 * PASSES_S + 0.3
    assert pair().carried([(100.0, ROUTE)], SPANS).tolist() == pytest.approx([5 * 10 / kept_s])
    for memory_bytes in (100.0, 700.0, 790.0):  # two are the least; a peer does not begin a part of a third
        assert pair(memory_bytes).carried([(100.0, ROUTE)], SPANS).tolist() == pytest.approx([2 * 10 / kept_s])


def test_a_round_lasts_until_its_last_micro_batch_is_back() -> None:
    """One more micro-batch than hops, or as many as memory allows; a step of ten needs five times two in flight."""
    alone_s, flow = 2 * PASSES_S + 0.3, [(100.0, ROUTE)]
    for memory_bytes, in_flight in ((1000.0, 3), (700.0, 2)):
        found = planned_in_flight.in_rounds(pair(memory_bytes), flow, SPANS, 1)
        assert found.tolist() == pytest.approx([in_flight * 10 / (alone_s + (in_flight - 1) * 0.1)])
    assert planned_in_flight.in_rounds(pair(700.0), flow, SPANS, 10).tolist() == pytest.approx(
        [100 / (5 * alone_s + 0.1)]
    )


def test_a_round_mostly_takes_as_long_as_the_slowest_of_its_routes() -> None:
    """Half of the micro-batches go to a peer that is nine times as slow: of three, one in eight rounds has none."""
    three = trio()
    costs = replace(three.costs, seconds_NL=three.costs.seconds_NL * np.array([[1.0], [1.0], [9.0]]))
    other = [(0, 0, 1), (2, 1, 2)]
    fast_s, slow_s = (replace(three, costs=costs).kept_s(hops, 0.0)[0] for hops in (ROUTE, other))
    spans = [*SPANS, (1, 2)]
    found = planned_in_flight.in_rounds(replace(three, costs=costs), [(50.0, ROUTE), (50.0, other)], spans, 1)
    longest_s = fast_s / 8 + slow_s * 7 / 8
    assert found.tolist() == pytest.approx([15 / (longest_s + 0.2)] * 2)


def test_only_an_origin_peer_that_computes_for_no_other_trains_in_rounds() -> None:
    """The second peer computes for the first one, too, so it pauses for fewer steps."""
    three, own = trio(), [(1, 0, 1), (2, 1, 2)]
    ample = replace(three, costs=replace(three.costs, memory_N=np.full(3, 1e4)))
    first, second = planned_in_flight.in_rounds(ample, [(40.0, ROUTE), (30.0, own)], [(0, 1), (0, 2), (1, 2)], 1)
    assert first == pytest.approx(30 / (2 * PASSES_S + 0.3 + 2 * 10 / 40))
    assert second == pytest.approx(BESIDE_STEPS * 30)


def test_a_bottleneck_of_several_origin_peers_pauses_for_a_fifth_of_its_time() -> None:
    """It pauses after four times as many micro-batches as pass in such a pause: six peers reached 190 of 216 tokens/s.

    Two micro-batches fit in its memory, of which one waits while it computes the other.
    """
    three, passes_s = trio(), 1 + JOBS_S
    costs = replace(three.costs, seconds_NL=10 * three.costs.seconds_NL, memory_N=np.array([1e4, 700.0, 1e4]))
    both = [(5.0, ROUTE), (5.0, [(2, 0, 1), (1, 1, 2)])]
    spans = [(0, 1), (1, 2), (0, 1)]
    found = planned_in_flight.in_rounds(replace(three, costs=costs), both, spans, 1)
    assert found.tolist() == pytest.approx([10 / (passes_s + passes_s / 4) / 2] * 2)
    rare = planned_in_flight.in_rounds(replace(three, costs=costs), both, spans, 10)  # 2 * 10 - 1 micro-batches a step
    pause_s = (2 * passes_s + 0.3 + passes_s) / 2
    slower_s = passes_s + pause_s / 19
    round_s = 5 * (2 * passes_s + 0.3) + 2 * slower_s
    assert rare.tolist() == pytest.approx([min(10 / slower_s / 2, 100 / round_s)] * 2)


def test_origin_peers_share_the_memory_of_a_hop() -> None:
    """Two micro-batches fit at the middle peer, which keeps each until it is back over a link with 1 s of delay.

    The queues at the middle and the last peer are short, as their devices are idle most of the time.
    """
    two, passes_s = pair(), PASSES_S
    delay = np.full((4, 4), 0.05)
    delay[1, 3] = delay[3, 1] = 1.0
    costs = replace(
        two.costs.of_peers(np.zeros(4, np.int64)),
        seconds_NL=np.full((4, 3), 0.01),
        memory_N=np.array([1e4, 700.0, 1e4, 1e4]),
        link_NN=np.full((4, 4), 1e4) - 1e4 * np.eye(4),
        state_L=np.full(3, 500.0),
        fetched_L=np.ones(3),
        activation_L=np.full(3, 100.0),
        snapshot_L=np.ones(3),
    )
    both = [(10.0, [(origin, 0, 1), (1, 1, 2), (3, 2, 3)]) for origin in (0, 2)]
    found = planned_in_flight.in_rounds(Pipeline(costs, delay, 10, 1), both, [(0, 1), (1, 2), (0, 1), (2, 3)], 1)
    back_s = 2 * passes_s + 2.2  # from the middle peer to the last one and back
    alone_s = passes_s + 0.3 + back_s
    in_rounds = 20 / (alone_s + 10 / 10)  # of each origin peer
    middle, last = (passes_s + (alone_s + one) / 2 / 32 for one in (back_s, passes_s))  # 32 gradients before a pause
    waiting = [4 * (2 * in_rounds / 10 * busy_s) ** 2 for busy_s in (middle, last)]
    assert found.sum() == pytest.approx(2 * 10 / (back_s + sum(waiting) * passes_s))
    assert found.sum() < 2 * in_rounds


def test_a_hop_through_fewer_layers_takes_a_part_of_a_place() -> None:
    """A place is a micro-batch through both layers that the peer holds, 200 bytes: two of them fit."""
    assert pair(1450.0).capacity((0, 0, 2), (0, 2)) == 2
    assert pair(1450.0).capacity((0, 0, 1), (0, 2)) == 4


def test_two_of_the_largest_micro_batches_fit_beside_a_part() -> None:
    assert [pair(bytes).costs.sequences(0, 0, 1) for bytes in (700.0, 899.0, 900.0)] == [1, 1, 2]
    assert pair(1400.0).costs.sequences(0, 0, 2) == 2  # one fits beside the whole model


def test_a_device_takes_time_for_the_jobs_of_each_micro_batch() -> None:
    assert pair(10_000.0).carried([(100.0, ROUTE)], SPANS).tolist() == pytest.approx([10 / PASSES_S])


def test_a_peer_with_the_whole_model_needs_no_memory_for_others() -> None:
    assert pair(0.0).carried([(100.0, [(0, 0, 2)])], [(0, 2), (0, 0)]).tolist() == [100.0]


def test_a_shorter_way_goes_first_where_memory_is_scarce() -> None:
    """Of two next peers, the first is ten times farther away."""
    near = pair()
    costs = near.costs.of_peers(np.array([0, 1, 1]))
    link, delay = np.full((3, 3), 1e4), np.full((3, 3), 0.05)
    np.fill_diagonal(link, 0.0)
    delay[0, 2] = delay[2, 0] = 0.5
    far = replace(near, costs=replace(costs, link_NN=link), delay_NN=delay)
    rates = far.carried([(40.0, [(0, 0, 1), (2, 1, 2)]), (40.0, ROUTE)], [*SPANS, (1, 2)])
    left = 5 - 40 / 10 * (4 * PASSES_S + 0.3)
    assert rates.tolist() == pytest.approx([left * 10 / (4 * PASSES_S + 1.2), 40.0])


def test_peers_pause_for_their_steps_one_after_another_with_exact_gradients() -> None:
    """A chain that nobody else uses: after a step the pipeline is empty. A micro-batch lasts 0.2 s at 50 tokens/s.

    Eight A100s in pairs reached 83,800 tokens/s; with a pause for each peer one after the other, 59,500 were expected.
    """
    first_s = 2 * PASSES_S + 0.3
    assert planned_in_flight.with_steps(pair(), [(50.0, ROUTE)], 1).tolist() == pytest.approx([10 / first_s])
    assert planned_in_flight.with_steps(pair(), [(50.0, ROUTE)], 99).tolist() == pytest.approx(
        [990 / (first_s + 98 * 0.2)]
    )
    assert planned_in_flight.with_steps(pair(), [(50.0, [(0, 0, 2)])], 1).tolist() == [50.0]


def test_hops_pause_for_the_micro_batches_of_all_origin_peers() -> None:
    """Two origin peers get half each of what one would carry if its hops paused one after the other.

    One micro-batch more is in flight than the step needs. The first hop pauses while a micro-batch takes its whole
    route, the second half as long before its commit comes.
    """
    first_s, second_s = 4 * PASSES_S + 0.3, 2 * PASSES_S
    alone = 20 / (first_s + (first_s + second_s) / 2 + 0.2)
    together = planned_in_flight.with_steps(trio(), [(25.0, ROUTE), (25.0, [(2, 0, 1), (1, 1, 2)])], 1)
    assert together.tolist() == pytest.approx([alone / 2, alone / 2])


def test_a_peer_that_no_route_needs_holds_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peer 2 could take the place of peer 0, but its link carries nothing; no second linear programme is solved."""
    costs = trio().costs
    link = costs.link_NN.copy()
    link[2] = link[:, 2] = 1e-3
    flights = Flights(np.full((3, 3), 0.05), config.load(None, ["model.context=16"]))
    problem = FlowProblem(replace(costs, link_NN=link), np.zeros(3, np.int64), flights)
    problem.flow(offered := np.array([*SPANS, (0, 1)]))
    monkeypatch.delattr(max_flow, "maximum")
    spans = planning.without_idle(problem, offered)
    assert spans.tolist() == [[0, 1], [1, 2], [0, 0]]


def test_steps_have_as_many_sequences_as_the_run_says() -> None:
    run = config.load(None, ["train.micro_batch=8", "train.accumulate=2"])
    assert [planned_in_flight.accumulated(run, sequences) for sequences in (1, 4, 64)] == [16, 4, 1]


def test_the_largest_micro_batch_is_chosen_that_costs_no_throughput() -> None:
    """With memory for hundreds of sequences, 64 together carry as much as one; with little memory each more costs."""
    run = config.load(None, ["model.context=10", "routes.overlap=true"])
    flights = Flights(DELAY_NN, run)
    ample = flights.carried(pair(1e5).costs, [(10.0, ROUTE)], np.array(SPANS))
    assert ample.pipeline.sequences == 64
    scarce = flights.carried(pair().costs, [(100.0, ROUTE)], np.array(SPANS))
    assert scarce.pipeline.sequences == 1
    assert scarce.tokens_per_s == pytest.approx(5 * 10 / (4 * PASSES_S + 0.3))


def test_spans_that_are_evaluated_again_cost_no_second_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.load(None, ["model.context=10", "routes.overlap=true"])
    problem = FlowProblem(pair().costs, np.zeros(2, np.int64), Flights(DELAY_NN, run))
    first = problem.evaluate(np.array(SPANS)).value
    assert first > 0
    monkeypatch.setattr(Flights, "carried", lambda *_: pytest.fail("solved again"))
    assert problem.evaluate(np.array(SPANS)).value == first
    problem.keep(np.array(SPANS), replace(problem.flow(np.array(SPANS))))  # another flow may carry something else
    with pytest.raises(pytest.fail.Exception):
        problem.evaluate(np.array(SPANS))
