"""Search for the spans (each peer's layers) with the highest throughput. Start reading at `search`.

The searches themselves are in scheduler/spans; `FlowProblem` tells them what spans cost and reach. They start from the
whole model on each peer whose memory is large enough, and from rows (rows.py) and a chain of peers in each group of
regions whose memory is large enough. The layers of a chain are cut by the devices' speeds, so that all peers need the
same time; then every span grows to fill its peer's memory, because overlapping spans let the flow balance the peers'
work. In a small swarm, the exact solver (milp.py) follows. A large swarm is searched in groups (peer_groups.py).

`spans_replan` finds new spans from old spans after peers left, joined, or changed their speed. It takes into account
how long downloads last:

    tokens of new spans = tokens/s * (seconds ahead - seconds of the slowest download)

All peers download the layers that are new to them at the same time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from decentral.core import rng as chance
from decentral.core.latest import keep_latest
from decentral.scheduler.spans import moves, searches
from decentral.scheduler.spans.moves import grown
from decentral.scheduler.spans.problem import SpanValue, soft_minimum
from decentral.scheduler.spans.trials import SLIGHTLY
from decentral.scheduler.throughput import bound, link_limits, max_flow, milp, peer_groups, routes, rows
from decentral.scheduler.throughput.estimates import Estimates
from decentral.scheduler.throughput.layer_costs import LayerCosts, reaches, span_bytes
from decentral.scheduler.throughput.max_flow import FlowSolver, MaxFlow
from decentral.scheduler.throughput.peer_kinds import access_limited
from decentral.scheduler.throughput.planned_in_flight import Carried, Flights
from decentral.scheduler.throughput.short_chains import short_chains
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

T = TypeVar("T")

SMALL_SWARM = 250  # with at most this many pairs of peer and span, the exact solver follows the search
SMALL_IN_ROUNDS = 150  # the same limit if the budget is in rounds; the exact solver needs seconds for larger swarms
EXACT_NODES = 5  # if the budget is in rounds, the exact solver visits at most this many branch-and-bound nodes
LINKED_CHAINS = 4  # for each way to group the peers, this many starts are chains along the fastest links
DRAWS = 12  # number of random starts in a swarm of at most 16 peers; larger swarms get 2
MOST_AT_ONCE = 64  # with more peers, groups of regions are searched one by one
GROUPS_SHARE = 0.5  # a large swarm's groups are searched for this share of the seconds; the rest is for the joint flow
# Seconds of a guide with its move on a quiet core: in all; per peer and layer; per two peers; per two layers.
GUIDE_S = (11e-6, 5e-9, 1e-9, 2.5e-9)
LEAST = 1e-6  # share of the bound that a layer without holders supplies in the guide, which needs numbers above 0


@dataclass(slots=True)
class FlowFigures(Generic[T]):
    """A cache of a figure of flows through spans, as searches evaluate the same spans several times."""

    _known: dict[bytes, tuple[MaxFlow, T]] = field(default_factory=dict)  # by the spans' bytes: the flow and its figure

    def of(self, spans_N2: Ints, flow: MaxFlow, find: Callable[[], T]) -> T:
        """Return the figure of this flow through these spans; `find` computes it if it is not known."""
        known = self._known.get(key := spans_N2.tobytes())
        if known is None or known[0] is not flow:
            known = flow, find()
            keep_latest(self._known, key, known, max_flow.FLOWS_REMEMBERED)
        return known[1]


@dataclass(frozen=True, eq=False)
class FlowProblem:
    """The spans of an asynchronous swarm as a `SpanProblem`; the throughput is that of max_flow.py."""

    costs: LayerCosts
    region_N: Ints  # each peer's region as a number
    flights: Flights | None = None  # None: do not count micro-batches in flight

    @property
    def reach_NL(self) -> Ints:
        """Return the end of each peer's longest span from each layer."""
        return reaches(self.costs)

    def supply(self, peer: int, first: int, last: int) -> float:
        """Return the tokens/s of a peer that always computes layers [first, last), as its links allow."""
        return float(self.supplies(np.array([peer]), np.array([[first, last]]))[0])

    def evaluate(self, spans_N2: Ints, progress: SearchProgress | None = None) -> SpanValue:
        """Return the throughput of the spans, by their maximum flow, and which peers are idle and which layers scarce.

        The throughput is 0 if the search lacks the time to compute the flow (`max_flow.maximum`).
        """
        flow = self.flow(spans_N2, progress)
        reached = self.reached(spans_N2, flow)
        if self.flights is not None and reached > 0:
            hops = round(self.carried(spans_N2, flow).hops)
            if reached > self._best.get(hops, (0.0, spans_N2))[0]:
                self._best[hops] = reached, spans_N2.copy()
        return SpanValue(reached, flow.idle_N, flow.price_L)

    def finalists(self, count: int) -> list[Ints]:
        """Return at most `count` different spans that may reach the most, the most promising first.

        They are the best spans evaluated so far, the plain chains (short_chains.py) or, if there are any, the peers
        with the whole model alone, and the best spans with routes of fewer or of more hops.
        """
        plain = [spans_N2 for spans_N2 in self._short[1] if self.valid(spans_N2)]
        plain.sort(key=lambda spans_N2: -self.evaluate(spans_N2).value)
        by_value = [spans_N2 for _, spans_N2 in sorted(self._best.values(), key=lambda one: -one[0])]
        fewest_hops = [self._best[hops][1] for hops in sorted(self._best)[:1]]
        found = [*by_value[:1], *plain, *fewest_hops, *by_value]
        return list({spans_N2.tobytes(): spans_N2 for spans_N2 in found}.values())[:count]

    def reached(self, spans_N2: Ints, flow: MaxFlow) -> float:
        """Return the tokens/s of a flow through these spans, less what micro-batches in flight cost."""
        if self.flights is not None and flow.tokens_per_s > 0:
            return self.carried(spans_N2, flow).tokens_per_s
        return self._reached.of(spans_N2, flow, lambda: self.costs.reached(spans_N2, flow))

    def carried(self, spans_N2: Ints, flow: MaxFlow) -> Carried:
        """Return what the routes of a flow through these spans carry; the problem must have `flights`."""
        assert self.flights is not None, "only plans for a topology have routes"
        flights = self.flights

        def find() -> Carried:
            paths = [(share * flow.tokens_per_s, hops) for share, hops in routes.routes(flow)]
            return flights.carried(self.costs, paths, spans_N2)

        return self._carried.of(spans_N2, flow, find)

    def flow(self, spans_N2: Ints, progress: SearchProgress | None = None) -> MaxFlow:
        """Return the maximum flow through the spans, cached or computed as by `max_flow.maximum`."""
        return self._flows.maximum(spans_N2, progress)

    def keep(self, spans_N2: Ints, flow: MaxFlow) -> None:
        """Remember a flow through these spans, which `flow` then returns."""
        self._flows.keep(spans_N2, flow)

    def guide(self, spans_N2: Ints, smooth: float) -> float:
        """Return an estimate of the throughput, from its limit, the links, and what the holders of layers supply."""
        _, carried, supply_L = self._estimates.of(spans_N2)
        return (1 - smooth) * carried + smooth * soft_minimum(supply_L + LEAST * self.bound())

    @cached_property
    def guide_s(self) -> float:
        """Return the seconds that a move and its `guide` take on a quiet core."""
        peers, layers = self.costs.peers, self.costs.layers
        return float(np.dot(GUIDE_S, (1, peers * layers, peers**2, layers**2)))

    def limit(self, spans_N2: Ints) -> float:
        """Return tokens/s that these spans do not exceed, without a linear programme."""
        return self._estimates.of(spans_N2)[0]

    def valid(self, spans_N2: Ints) -> bool:
        """Return whether all spans fit in memory, and each layer has as many holders as it needs."""
        return self.costs.valid(spans_N2)

    def repaired(self, spans_N2: Ints) -> Ints:
        """Return the spans if they are valid, otherwise a copy in which layers with too few holders get more."""
        return spans_N2 if self.valid(spans_N2) else moves.repaired(self.reach_NL, spans_N2, self.costs.holders)

    def bound(self) -> float:
        """Return tokens/s that no spans exceed."""
        return self._bound

    def starts(self, rng: np.random.Generator) -> list[Ints]:
        """Return the first spans of a search: `chains` and rows (rows.py) for each of `groupings`, and random spans.

        In a large swarm, rows come first, as their flows take less time. In a smaller one in which no peer can hold the
        whole model, short chains (short_chains.py) come before all others; for many peers they would take minutes.
        """
        divisions, large = groupings(self), self.costs.peers > MOST_AT_ONCE
        chained = [chains(self, groups, rng) for groups in divisions]
        if not access_limited(self.costs).all():
            longer = [groups for groups in divisions if len(groups) < self.costs.peers]
            chained += [chains(self, groups, rng, linked=True) for groups in longer for _ in range(LINKED_CHAINS)]
        in_rows = [rows.in_rows_of_groups(self, self.region_N, groups) for groups in divisions[::2]]
        short, plain = self._short
        found = short + plain + (in_rows + chained if large else chained + in_rows)
        return found + [moves.filled(self, rng) for _ in range(DRAWS if self.costs.peers <= 16 else 2)]

    @cached_property
    def _flows(self) -> FlowSolver:
        return FlowSolver(self.costs)

    @cached_property
    def _reached(self) -> FlowFigures[float]:
        """Return the cache of the tokens/s of flows by `LayerCosts.reached`, without `flights`."""
        return FlowFigures()

    @cached_property
    def _carried(self) -> FlowFigures[Carried]:
        """Return the cache of what the routes of flows carry."""
        return FlowFigures()

    @cached_property
    def _short(self) -> tuple[list[Ints], list[Ints]]:
        """Return the short chains and the plain ones (short_chains.py).

        Peers with the whole model alone take the place of plain chains. A swarm of very many peers has neither.
        """
        whole_N = self.reach_NL[:, 0] == self.costs.layers
        if whole_N.any():
            return [], [np.where(whole_N[:, None], (0, self.costs.layers), 0)]
        if self.flights is None or self.costs.peers > MOST_AT_ONCE:
            return [], []
        divisions, pipeline = groupings(self), self.flights.single(self.costs)
        return short_chains(self, (divisions[0], *divisions[2:]), pipeline, self.flights.micro_batches_waited_for)

    @cached_property
    def _best(self) -> dict[int, tuple[float, Ints]]:
        """For each number of hops on routes: the best spans evaluated so far, and their tokens/s."""
        return {}

    @cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self.costs, self.flights)

    @cached_property
    def _bound(self) -> float:
        return bound.throughput_bound(self.costs, self.reach_NL)

    @cached_property
    def _seconds_before(self) -> Floats:
        """Return each peer's seconds per token for all layers before each layer, [N, L + 1]."""
        return np.pad(np.cumsum(self.costs.seconds_NL, axis=1), ((0, 0), (1, 0)))

    @cached_property
    def _crossings(self) -> Floats:
        """Return how many tokens' activations each peer's links can carry per second, [N]."""
        return bound.access(self.costs) / self.costs.hidden_bytes

    def supplies(self, peers_P: Ints, spans_P2: Ints) -> Floats:
        """Return the tokens/s, (P,), of peers that always compute these spans, as their links and memories allow."""
        first, last = spans_P2.T
        compute = 1 / (self._seconds_before[peers_P, last] - self._seconds_before[peers_P, first])
        crossings = (first > 0) + 1.0 * (last < self.costs.layers)
        linked = self._crossings[peers_P] / np.maximum(crossings, 1e-9)
        return np.asarray(np.minimum(np.minimum(compute, linked), self._estimates.kept(peers_P, spans_P2)))


def search(
    problem: FlowProblem,
    budget: SearchBudget,
    rng: np.random.Generator,
    first: Ints | None = None,
    solver: str = "genetic",
) -> Ints:
    """Return the spans_N2 with the highest throughput that a search finds within the budget.

    Args:
        problem: What spans may be held, and what they reach.
        budget: Limit of the search; in a small swarm, half of it is for the exact solver, as a limit of its nodes
            (EXACT_NODES if the budget is in rounds), so that equal seeds give equal spans.
        rng: Source of all random choices.
        first: When replanning, spans_N2 that are an additional start; None: no additional start.
        solver: A name in `searches.SEARCHES`. With the default, the exact solver follows in a small swarm, and a large
            swarm is searched in groups of regions.
    """
    costs = problem.costs
    if solver == "genetic" and costs.peers > MOST_AT_ONCE:
        groups = peer_groups.groups(problem, problem.region_N)
        if len(groups) > 1:
            return _search_by_groups(problem, groups, budget, rng, first)
    timed = budget.seconds < np.inf
    small = solver == "genetic" and milp.options(costs) <= (SMALL_SWARM if timed else SMALL_IN_ROUNDS)
    found = searches.search(problem, solver, budget.part(0.5) if small else budget, rng, first)
    if small and found.value < problem.bound() * (1 - SLIGHTLY):
        progress = SearchProgress(budget.part(0.5), -found.value)
        nodes = milp.nodes_within(costs, progress.work_left_s()) if timed else EXACT_NODES
        exact = milp.best_spans(costs, progress.clock_left_s(), nodes) if nodes else None
        progress.count(progress.work_left_s() if timed else 0.0)
        if exact is not None and problem.valid(exact) and problem.evaluate(exact).value > found.value:
            return exact
    return found.spans_N2


def _search_by_groups(
    problem: FlowProblem, groups: Sequence[Ints], budget: SearchBudget, rng: np.random.Generator, first: Ints | None
) -> Ints:
    """Return spans_N2 of a large swarm: each group of peers holds the whole model, and is searched by itself.

    The groups' flows together are a flow of the swarm, so that no linear programme of all peers is needed. If the
    budget has the time, such a programme is solved at the end, since transfers between groups may raise the flow.
    """
    progress, costs = SearchProgress(budget, np.inf), problem.costs
    spans_N2, flows = np.zeros((costs.peers, 2), np.int64), list[tuple[Ints, MaxFlow]]()
    within = budget.part(GROUPS_SHARE)
    holders, left = -(-costs.holders // len(groups)), costs.peers
    for group in groups:
        flights = problem.flights and problem.flights.of_peers(group)
        part = FlowProblem(replace(costs.of_peers(group), holders=holders), problem.region_N[group], flights)
        share = within.less(progress.seconds()).part(len(group) / left).silent()
        spans_N2[group] = search(part, share, rng, None if first is None else first[group])
        flows.append((group, part.flow(spans_N2[group])))
        left -= len(group)
        progress.report(-sum(flow.tokens_per_s for _, flow in flows))
    separate = max_flow.together(costs, flows)
    joined = max_flow.maximum(costs, spans_N2, progress)
    problem.keep(spans_N2, max(separate, joined, key=lambda flow: problem.reached(spans_N2, flow)))
    return spans_N2


def groupings(problem: FlowProblem) -> list[list[Ints]]:
    """Return several ways to divide the peers into groups, each of which can form a chain.

    The divisions are: all peers in one group, one group per peer, and groups of regions (peer_groups.py).
    """
    everyone = np.arange(problem.costs.peers)
    regional = peer_groups.groups(problem, problem.region_N)
    return [[everyone], [np.array([peer]) for peer in everyone], *([regional] if len(regional) > 1 else [])]


def chains(problem: FlowProblem, groups: list[Ints], rng: np.random.Generator, linked: bool = False) -> Ints:
    """Return spans that form a chain in each group: the peers in some order, with layers by speed, as memory allows.

    Every span then grows to fill its peer's memory.

    Args:
        problem: The swarm.
        groups: The indices of each group's peers.
        rng: Chooses whether a chain begins or ends with the largest memory, or with which peer it begins.
        linked: Whether each peer is followed by the one to which it has the fastest link; else by memory.
    """
    costs = problem.costs
    spans = np.zeros((costs.peers, 2), np.int64)
    cost_L = (costs.seconds_NL / costs.seconds_NL.sum(axis=1, keepdims=True)).mean(axis=0)
    edges = np.concatenate(([0.0], np.cumsum(cost_L)))
    for group in groups:
        if linked:
            order = _along_links(costs, group, rng)
        else:
            order = group[np.argsort(-costs.memory_N[group], kind="stable")]
            order = order if rng.random() < 0.5 else order[::-1]
        speed = 1 / costs.seconds_NL[order].sum(axis=1)
        largest = (edges[problem.reach_NL[order]] - edges[:-1]).max(axis=1)
        share = rows.shared(1.0, largest, speed)
        ends = np.concatenate(([0.0], np.cumsum(share) / share.sum()))
        for peer, begin, end in zip(order, ends, ends[1:], strict=False):
            first = min(int(np.searchsorted(edges, begin + 1e-9, side="right")) - 1, costs.layers - 1)
            last = max(first + 1, int(np.searchsorted(edges, end - 1e-9)))
            spans[peer] = grown(problem.reach_NL[peer], first, min(last, costs.layers))
    return spans


def _along_links(costs: LayerCosts, group: Ints, rng: np.random.Generator) -> Ints:
    """Return the peers of a group in an order that begins at random, and always follows the fastest link."""
    link_GG = costs.link_NN[np.ix_(group, group)].copy()
    order = [int(rng.integers(len(group)))]
    while len(order) < len(group):
        link_GG[:, order[-1]] = -1.0
        order.append(int(np.argmax(link_GG[order[-1]])))
    return group[order]


def equal_random(costs: LayerCosts, rng: np.random.Generator) -> Ints:
    """Return the spans_N2 of the baseline "equal spans, random placement".

    The model is cut into the fewest equal stages that fit in every peer's memory, and each peer gets a random stage. If
    some peer cannot even hold a single layer, peers whose stage does not fit get no layers.
    """
    bytes_EE = span_bytes(costs)
    for stages in range(1, costs.layers + 1):
        cuts = np.round(np.linspace(0, costs.layers, stages + 1)).astype(np.int64)
        if (bytes_EE[cuts[:-1], cuts[1:]] <= costs.memory_N.min()).all() or stages == costs.layers:
            break
    stage_N = rng.permutation(costs.peers) % stages
    spans = np.stack((cuts[stage_N], cuts[stage_N + 1]), axis=1)
    fits_N = bytes_EE[spans[:, 0], spans[:, 1]] <= costs.memory_N
    return np.where(fits_N[:, None], spans, 0)


def spans_replan(
    costs: LayerCosts, region_N: Ints, old_N2: Ints, budget: SearchBudget, seed: int, seconds_ahead: float
) -> tuple[Ints, float]:
    """Return new spans_N2 after a change of the swarm, and on how many tokens the swarm will train with them.

    The function compares two candidates: the old spans, with newcomers placed and layers with too few holders repaired,
    and the spans that a search finds from this start.

    Args:
        costs: What layers cost each peer, after the change.
        region_N: Each peer's region as a number.
        old_N2: Spans before the change; (0, 0) for newcomers.
        budget: Limit of the search.
        seed: Seed of all random choices.
        seconds_ahead: Seconds from now over which the tokens are counted, including the time of downloads.
    """
    kept = np.array([span if costs.fits(i, int(span[0]), int(span[1])) else (0, 0) for i, span in enumerate(old_N2)])
    problem = FlowProblem(costs, region_N)
    patched = problem.repaired(_newcomers_placed(problem, kept))
    found = search(problem, budget, chance.arrays(seed, "replan"), first=patched)
    tokens = tokens_ahead(costs, old_N2, found, seconds_ahead)
    staying = tokens_ahead(costs, old_N2, patched, seconds_ahead) if costs.valid(patched) else 0.0
    return (found, tokens) if tokens > staying * (1 + SLIGHTLY) else (patched, staying)


def tokens_ahead(costs: LayerCosts, old_N2: Ints, new_N2: Ints, seconds_ahead: float) -> float:
    """Return on how many tokens the swarm trains in `seconds_ahead` seconds, after the slowest download of layers."""
    pause = link_limits.download_s(costs, max_flow.held(costs, old_N2), max_flow.held(costs, new_N2))
    return costs.reached(new_N2, max_flow.maximum(costs, new_N2)) * max(0.0, seconds_ahead - pause)


def _newcomers_placed(problem: FlowProblem, kept_N2: Ints) -> Ints:
    """Return a copy of the spans in which each peer without layers gets a span at the layer with the fewest holders."""
    placed = kept_N2.copy()
    for peer in np.flatnonzero(kept_N2[:, 0] >= kept_N2[:, 1]):
        layer = int(np.argmin(max_flow.held(problem.costs, placed).sum(axis=0)))
        placed[peer] = grown(problem.reach_NL[peer], layer, layer + 1)
    return placed
