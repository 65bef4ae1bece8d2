"""Order peers into chains through which a micro-batch passes fastest. Start at `short_chains`.

Where each peer holds a small part of the model, a route has many hops. Its throughput then depends less on the devices'
speeds than on the time for which a micro-batch is on its way (planned_in_flight.py), and so on the order of the peers.
A chain is a way through the peers, as in the travelling salesman problem. The search begins with ways on which each
peer is followed by the nearest peer that is left. Then it moves peers and reverses parts of a way as long as that makes
it faster.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np

from decentral.scheduler.throughput import bound
from decentral.scheduler.throughput.planned_in_flight import JOBS_S, WAITING, Pipeline
from decentral.scheduler.throughput.routes import Hop
from decentral.scheduler.throughput.rows import Supplies
from decentral.scheduler.topology.arrays import Ints

BEGINNINGS = 3  # a search begins from the fastest ways of this many different first peers
MUCH_SLOWER = 1.2  # a chain that is this many times as slow as the next faster one may be left out
HALVINGS = 30  # of the interval that contains the time of a chain's slowest peer
MOST_TRIES = 10_000  # after this many changes a search does not look through all changes again; each takes about 20 us

Order = list[int]
"""Peers. Each holds as many layers as fit, after those of the peer before it; peers after the last layer hold none."""


def short_chains(
    problem: Supplies, divisions: Iterable[Sequence[Ints]], pipeline: Pipeline, accumulate: int | None
) -> tuple[list[Ints], list[Ints]]:
    """Return spans_N2 in which each group of peers forms as many chains as it can, and those of plain chains.

    The first list has two forms for each division. A group's chains exchange peers with each other, and with the peers
    that are left over, while that raises the sum of their throughputs. In the first form, peers that are left over hold
    no layers. In the second form, each of them holds the layers of the chain member of its group that it can replace
    with the smallest detour.

    The second list has chains that share no peer and no layer twice: the fastest chains alone, and more of them. Their
    layers are cut so that a chain's slowest peer is as fast as possible. Peers that several routes share make these
    wait for each other's steps and for the slowest device, so a few fast chains often reach more than all peers do.

    Args:
        problem: The whole swarm.
        divisions: Ways to divide the peers into groups; each lists the indices of each group's peers.
        pipeline: The costs of a micro-batch of one sequence.
        accumulate: The smallest number of micro-batches in a step with exact gradients; None: steps wait for none.
    """
    ways, starts, plain = _Ways(problem, pipeline, accumulate), list[Ints](), dict[bytes, Ints]()
    for groups in divisions:
        formed = [ways.disjoint(group.tolist()) for group in groups]
        starts += _spans_of(groups, formed, ways, problem.costs.peers)
        orders = [order for of_group, _ in formed for order in of_group]
        plain |= {spans_N2.tobytes(): spans_N2 for spans_N2 in _plain(orders, ways, problem.costs.peers)}
    return starts, list(plain.values())


def _plain(orders: Sequence[Order], ways: "_Ways", peers: int) -> Iterator[Ints]:
    """Yield the spans of the fastest of these chains, then of more, wherever the next chain is MUCH_SLOWER."""
    timed = sorted((ways.seconds(order), ways.balanced(order)) for order in orders)
    spans_N2 = np.zeros((peers, 2), np.int64)
    for (seconds, hops), (next_s, _) in itertools.pairwise([*timed, (np.inf, [])]):
        for peer, first, last in hops:
            spans_N2[peer] = first, last
        if next_s > MUCH_SLOWER * seconds:
            yield spans_N2.copy()


def _spans_of(
    groups: Sequence[Ints], formed: Sequence[tuple[list[Order], list[int]]], ways: "_Ways", peers: int
) -> tuple[Ints, Ints]:
    """Return both forms of `short_chains` for one division of this many peers, and the chains formed in each group."""
    alone_N2 = np.zeros((peers, 2), np.int64)
    beside_N2 = alone_N2.copy()
    for group, (orders, left) in zip(groups, formed, strict=True):
        chains = [ways.hops(ways.improved(order)[1]) for order in ways.exchanged([*orders, left])]
        left = sorted(set(group.tolist()) - {peer for hops in chains for peer, _ in hops})
        for peer, first in itertools.chain.from_iterable(chains):
            alone_N2[peer] = beside_N2[peer] = first, ways.reach[peer][first]
        for peer in left:
            if places := [place for hops in chains for place in ways.beside(peer, hops)]:
                beside_N2[peer] = min(places)[1]
    return alone_N2, beside_N2


@dataclass(slots=True)
class _Ways:
    """The times of micro-batches on paths through peers, whose layers are cut so that all compute equally long.

    The tables are lists, which Python reads fastest.
    """

    problem: InitVar[Supplies]
    pipeline: InitVar[Pipeline]
    accumulate: int | None
    reach: list[list[int]] = field(init=False)  # peer -> first layer -> the end of the longest span
    before_s: list[list[float]] = field(init=False)  # peer -> layer -> seconds per token for all layers before it
    passes_s: list[list[float]] = field(init=False)  # peer -> first layer -> to compute that span, queueing included
    busy_s: list[list[float]] = field(init=False)  # peer -> first layer -> seconds of its links per micro-batch
    tokens_s: list[float] = field(init=False)  # peer -> seconds per micro-batch through the whole model
    capacity: list[list[float]] = field(init=False)  # peer -> first layer -> micro-batches in memory
    link_s: list[list[float]] = field(init=False)  # sender -> receiver -> a micro-batch's transfers, there and back
    apart_s: list[list[float]] = field(init=False)  # sender -> receiver -> seconds per micro-batch on this link

    def __post_init__(self, problem: Supplies, pipeline: Pipeline) -> None:
        """Fill the tables."""
        costs, reach_NL = problem.costs, problem.reach_NL
        peers, layers, tokens = range(costs.peers), np.arange(costs.layers), pipeline.tokens
        before = np.pad(np.cumsum(costs.seconds_NL, axis=1), ((0, 0), (1, 0)))
        seconds_NL = np.take_along_axis(before, reach_NL, axis=1) - before[:, :-1]
        crossings_NL = (layers > 0) + 1.0 * (reach_NL < costs.layers)
        sent_s_N = costs.hidden_bytes / np.maximum(bound.access(costs), 1e-9)
        self.reach, self.before_s = reach_NL.tolist(), before.tolist()
        self.passes_s = ((1 + WAITING) * (JOBS_S + tokens * seconds_NL)).tolist()
        self.busy_s = np.maximum(JOBS_S, tokens * crossings_NL * sent_s_N[:, None]).tolist()
        self.tokens_s = (tokens * before[:, -1]).tolist()
        self.capacity = [
            [
                pipeline.capacity((peer, first, last), (first, last)) if first < last else 1.0
                for first, last in enumerate(self.reach[peer])
            ]
            for peer in peers
        ]
        linked_NN = costs.link_NN > 0
        self.link_s = [[pipeline.link_s(a, b) if linked_NN[a, b] else np.inf for b in peers] for a in peers]
        nothing = np.full(linked_NN.shape, np.inf)
        self.apart_s = np.divide(tokens * costs.hidden_bytes, costs.link_NN, out=nothing, where=linked_NN).tolist()

    def hops(self, order: Order) -> list[tuple[int, int]]:
        """Return (peer, first layer) of the peers that hold the layers; no hops if the peers cannot hold them all."""
        hops, at, layers = [], 0, len(self.reach[0])
        for peer in order:
            if (end := self.reach[peer][at]) == at:
                return []
            hops.append((peer, at))
            if end == layers:
                return hops
            at = end
        return []

    def seconds(self, order: Order) -> float:
        """Return the seconds between two micro-batches on this path, as `planned_in_flight.with_steps` has them."""
        hops = self.hops(order)
        if not hops:
            return np.inf
        kept_s = empty_s = busy_s = full_s = 0.0
        after = -1
        for peer, first in reversed(hops):
            if after >= 0:
                kept_s += self.link_s[peer][after]
                empty_s += self.link_s[peer][after]
                busy_s = max(busy_s, self.apart_s[peer][after])
            kept_s += self.passes_s[peer][first]
            empty_s += self.passes_s[peer][first] / (1 + WAITING)
            busy_s = max(busy_s, self.busy_s[peer][first])
            full_s = max(full_s, kept_s / self.capacity[peer][first])
            after = peer
        busy_s = max(busy_s, 1 / sum(1 / self.tokens_s[peer] for peer, _ in hops))
        if self.accumulate is not None and len(hops) > 1:
            busy_s = max(busy_s, (empty_s + (self.accumulate - 1) * busy_s) / self.accumulate)
        return max(busy_s, full_s)

    def disjoint(self, left: list[int]) -> tuple[list[Order], list[int]]:
        """Return chains of these peers, the fastest first, until no more can be formed, and the peers that are left."""
        orders = list[Order]()
        while (order := self.shortest(left)) is not None:
            orders.append([peer for peer, _ in self.hops(order)])
            left = [peer for peer in left if peer not in orders[-1]]
        return orders, left

    def balanced(self, order: Order) -> list[Hop]:
        """Return the hops of a chain whose slowest peer is as fast as any cut of the layers allows."""
        least_s, most_s, best = 0.0, sum(self.before_s[peer][-1] for peer in order), list[Hop]()
        for _ in range(HALVINGS):
            limit_s = (least_s + most_s) / 2
            hops, at = list[Hop](), 0
            for peer in order:
                before_s = self.before_s[peer]
                last = min(self.reach[peer][at], bisect.bisect_right(before_s, before_s[at] + limit_s) - 1)
                if last > at:
                    hops.append((peer, at, last))
                    at = last
                if at == len(self.reach[0]):
                    break
            if at == len(self.reach[0]):
                best, most_s = hops, limit_s
            else:
                least_s = limit_s
        return best

    def beside(self, peer: int, hops: Sequence[tuple[int, int]]) -> Iterator[tuple[float, tuple[int, int]]]:
        """Yield (seconds of the detour, span) for each hop of a chain whose layers fit into this peer's memory."""
        for at, (held, first) in enumerate(hops):
            if self.reach[peer][first] >= (last := self.reach[held][first]):
                sender, receiver = hops[at - 1][0], hops[(at + 1) % len(hops)][0]
                come_s = self.link_s[sender][peer] - self.link_s[sender][held] if at else 0.0
                go_s = self.link_s[peer][receiver] - self.link_s[held][receiver] if at + 1 < len(hops) else 0.0
                yield come_s + go_s, (first, last)

    def shortest(self, peers: list[int]) -> Order | None:
        """Return these peers in the fastest order that the search finds; None if it finds no complete chain."""
        ways = [self._by_nearest(first, peers) for first in peers]
        timed = sorted((seconds, order) for order in ways if (seconds := self.seconds(order)) < np.inf)
        return min((self.improved(order) for _, order in timed[:BEGINNINGS]), default=(0.0, None))[1]

    def exchanged(self, orders: Sequence[Order]) -> list[Order]:
        """Return the orders after those exchanges of two peers between them that raise the sum of their throughputs."""
        found, rates = [*orders], [1 / self.seconds(order) for order in orders]
        tries, gained = 0, True
        while gained and tries < MOST_TRIES:
            gained = False
            for one, other in itertools.combinations(range(len(found)), 2):
                for at, to in itertools.product(range(len(found[one])), range(len(found[other]))):
                    pair = _exchanged(found[one], found[other], at, to)
                    changed = [1 / self.seconds(order) for order in pair]
                    tries += 1
                    if sum(changed) > (rates[one] + rates[other]) * (1 + 1e-9):
                        (found[one], found[other]), (rates[one], rates[other]), gained = pair, changed, True
        return found

    def _by_nearest(self, first: int, peers: list[int]) -> Order:
        """Return an order that begins with a peer, and goes on to the nearest peer that can hold the next layer."""
        order, at, layers = [first], self.reach[first][0], len(self.reach[0])
        left = [peer for peer in peers if peer != first]
        while at < layers and (able := [peer for peer in left if self.reach[peer][at] > at]):
            near_s = self.link_s[order[-1]]
            order.append(min(able, key=near_s.__getitem__))
            left.remove(order[-1])
            at = self.reach[order[-1]][at]
        return order + left

    def improved(self, order: Order) -> tuple[float, Order]:
        """Return (seconds, order) once no change makes the order faster, or after about MOST_TRIES changes."""
        best_s, tries, stuck = self.seconds(order), 0, False
        while not stuck and tries < MOST_TRIES:
            stuck = True
            for number in range(len(self.hops(order)) * len(order)):
                to, at = divmod(number, len(order))
                for changed in _changed(order, to, at):
                    tries += 1
                    if (seconds := self.seconds(changed)) < best_s * (1 - 1e-9):
                        order, best_s, stuck = changed, seconds, False
        return best_s, order


def _exchanged(one: Order, other: Order, at: int, to: int) -> tuple[Order, Order]:
    """Return two orders in which the peers at these places, one in each, have changed places."""
    return [*one[:at], other[to], *one[at + 1 :]], [*other[:to], one[at], *other[to + 1 :]]


def _changed(order: Order, to: int, at: int) -> Iterator[Order]:
    """Yield an order with the peer at `at` moved to `to`; if `to` < `at`, also with the part reversed, and a swap."""
    if at == to:
        return
    rest = order[:at] + order[at + 1 :]
    yield [*rest[:to], order[at], *rest[to:]]
    if to < at:
        yield order[:to] + order[to : at + 1][::-1] + order[at + 1 :]
        yield [*order[:to], order[at], *order[to + 1 : at], order[to], *order[at + 1 :]]
