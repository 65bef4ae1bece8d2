"""Search for the spans (each peer's layers) with the greatest throughput. Start reading at `search`.

The search starts from the whole model on each peer whose memory is large enough, and from a chain of peers in each
group of regions whose memory is large enough. The layers of a chain are cut by the devices' speeds, so that all peers
need the same time; then every span grows to fill its peer's memory, because overlapping spans let the flow balance the
peers' work. The search moves, swaps, grows and shrinks spans, preferably those of idle peers and towards scarce layers,
and compares the results by their flow (max_flow.py). In a small swarm, the exact solver (milp.py) runs afterwards.

`spans_replan` finds new spans from old spans after peers left, joined, or changed their speed. It takes into account
how long downloads last:

    tokens of new spans = tokens/s * (seconds ahead - seconds of the slowest download)

All peers download the layers that are new to them at the same time.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from decentral.core import rng as chance
from decentral.scheduler.throughput import link_limits, max_flow, milp
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.max_flow import FlowSolver, MaxFlow
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

SMALL_SWARM = 250  # with at most this many pairs of peer and span, an exact solver follows the search
DRAWS = 12  # number of random starts in a swarm of at most 16 peers; larger swarms get 2
SEARCH_PATIENCE = 12  # after this many mutations per peer without gain, the search restarts elsewhere
MOST_RESTARTS = 30
SLIGHTLY = 1e-9  # flows that differ by a smaller share than this count as equal

Candidate = tuple[MaxFlow, Ints]
"""Spans that the search considers: (the flow through them, spans_N2)."""


def search(
    costs: LayerCosts, region_N: Ints, budget: SearchBudget, rng: np.random.Generator, first: Ints | None = None
) -> Ints:
    """Return the spans_N2 with the greatest throughput that the search finds within the budget.

    Args:
        costs: What layers cost each peer.
        region_N: Each peer's region as a number.
        budget: Limit of the search; in a small swarm, half of its seconds is reserved for the exact solver.
        rng: Source of all random choices.
        first: When replanning, spans_N2 that are an additional start; None: no additional start.
    """
    small = milp.options(costs) <= SMALL_SWARM
    search = _Search(FlowSolver(costs), SearchProgress(budget.part(0.5) if small else budget, np.inf), rng)
    starts = [first] if first is not None else []
    starts += [chains(costs, groups, rng) for groups in groupings(costs, region_N)]
    starts += [fill(costs, rng) for _ in range(DRAWS if costs.peers <= 16 else 2)]
    best = search.climb(search.best_start([_valid(costs, spans) for spans in starts]))
    return _finished(costs, best[1], best[0].tokens_per_s, budget) if small else best[1]


@dataclass(slots=True)
class _Search:
    flows: FlowSolver
    progress: SearchProgress
    rng: np.random.Generator
    longest_s: float = 0.0  # longest time that one flow has taken; the search ends early enough for one more

    def evaluated(self, spans: Ints) -> Candidate:
        begin = self.progress.seconds()
        flow = self.flows.maximum(spans)
        self.longest_s = max(self.longest_s, self.progress.seconds() - begin)
        return flow, spans

    def best_start(self, starts: list[Ints]) -> Candidate:
        """Return the best of these spans; evaluate as many as the budget's time allows, but at least one."""
        found: list[Candidate] = []
        for spans in starts:
            if not found or not self.progress.late(self.longest_s):
                found.append(self.evaluated(spans))
        return max(found, key=lambda pair: (self.flows.costs.valid(pair[1]), pair[0].tokens_per_s))

    def climb(self, best: Candidate) -> Candidate:
        """Return the best candidate that mutations of `best` lead to; restart after many mutations without gain."""
        costs = self.flows.costs
        here, stuck, restarts = best, 0, 0
        while self.progress.goes_on(self.longest_s) and not _reaches_bound(costs, best[0].tokens_per_s):
            if stuck > SEARCH_PATIENCE * costs.peers:
                if restarts > MOST_RESTARTS:
                    break
                here = self.restarted(best[1])
                stuck, restarts = 0, restarts + 1
            child = mutated(costs, here[1], here[0], self.rng)
            stuck += 1
            if costs.valid(child):
                found = self.evaluated(child)
                if found[0].tokens_per_s > here[0].tokens_per_s * (1 + SLIGHTLY):
                    stuck = 0
                if found[0].tokens_per_s > here[0].tokens_per_s * (1 - SLIGHTLY):  # accept equal flows, too
                    here = found
                if found[0].tokens_per_s > best[0].tokens_per_s:
                    best = here
            self.progress.report(-best[0].tokens_per_s)
        return best

    def restarted(self, best: Ints) -> Candidate:
        """Return new spans to continue from: random spans, or with probability 1/2 a mix of random and best spans."""
        costs = self.flows.costs
        spans = fill(costs, self.rng)
        if self.rng.random() < 0.5:
            kept = self.rng.random(costs.peers) < 0.7
            spans = np.where(kept[:, None], best, spans)
        spans = _valid(costs, spans)
        spans = spans if costs.valid(spans) else best
        return self.flows.maximum(spans), spans


def _valid(costs: LayerCosts, spans: Ints) -> Ints:
    """Return the spans if they are valid, otherwise a copy in which layers with too few holders get more."""
    return spans if costs.valid(spans) else repaired(costs, spans)


def _reaches_bound(costs: LayerCosts, tokens_per_s: float) -> bool:
    return tokens_per_s >= costs.compute_bound() * (1 - SLIGHTLY)


def _finished(costs: LayerCosts, spans: Ints, tokens_per_s: float, budget: SearchBudget) -> Ints:
    """Return the exact solver's spans if they are better than the given spans, else the given spans."""
    if not _reaches_bound(costs, tokens_per_s):
        exact = milp.best_spans(costs, budget.seconds / 2)
        if exact is not None and max_flow.maximum(costs, exact).tokens_per_s > tokens_per_s:
            return exact
    return spans


def groupings(costs: LayerCosts, region_N: Ints) -> list[list[Ints]]:
    """Return several ways to divide the peers into groups, each of which can form a chain.

    The divisions are: all peers in one group, one group per peer, and one group per region. A region whose memory is
    too small for the model is joined to the region with the fastest link to it.
    """
    everyone = [np.arange(costs.peers)]
    groups = [np.flatnonzero(region_N == region) for region in range(int(region_N.max()) + 1)]
    divisions = [everyone, [np.array([peer]) for peer in everyone[0]]]
    while len(groups) > 1:
        weak = [group for group in groups if not _enough(costs, group)]
        if not weak:
            divisions.append(groups)
            break
        smallest = min(weak, key=lambda group: float(costs.memory_N[group].sum()))
        others = [group for group in groups if group is not smallest]
        near = max(range(len(others)), key=lambda i: float(costs.link_NN[np.ix_(smallest, others[i])].max()))
        others[near] = np.concatenate((others[near], smallest))
        groups = others
    return divisions


def _enough(costs: LayerCosts, group: Ints) -> bool:
    return float(costs.memory_N[group].sum()) > 1.25 * float(costs.state_L.sum())


def chains(costs: LayerCosts, groups: list[Ints], rng: np.random.Generator) -> Ints:
    """Return spans that form a chain in each group: the peers in order of memory, with layers in proportion to speed.

    Every span then grows to fill its peer's memory. `rng` chooses whether a chain begins or ends with the largest
    memory.
    """
    spans = np.zeros((costs.peers, 2), np.int64)
    cost_L = costs.seconds_NL[0] / costs.seconds_NL[0].sum()
    edges = np.concatenate(([0.0], np.cumsum(cost_L)))
    for group in groups:
        order = group[np.argsort(-costs.memory_N[group], kind="stable")]
        order = order if rng.random() < 0.5 else order[::-1]
        speed = 1 / costs.seconds_NL[order].sum(axis=1)
        ends = np.concatenate(([0.0], np.cumsum(speed) / speed.sum()))
        for peer, begin, end in zip(order, ends, ends[1:], strict=False):
            first = min(int(np.searchsorted(edges, begin + 1e-9, side="right")) - 1, costs.layers - 1)
            last = max(first + 1, int(np.searchsorted(edges, end - 1e-9)))
            spans[peer] = grown(costs, int(peer), first, min(last, costs.layers))
    return spans


def grown(costs: LayerCosts, peer: int, first: int, last: int) -> tuple[int, int]:
    """Return the span [first, last), shortened to fit in the peer's memory or widened on both sides to fill it.

    The result is (0, 0) if not even layer `first` fits.
    """
    while last > first + 1 and not costs.fits(peer, first, last):
        last -= 1
    if not costs.fits(peer, first, last):
        return 0, 0
    before = None
    while before != (first, last):
        before = first, last
        last += last < costs.layers and costs.fits(peer, first, last + 1)
        first -= first > 0 and costs.fits(peer, first - 1, last)
    return first, last


def fill(costs: LayerCosts, rng: np.random.Generator) -> Ints:
    """Return spans that fill every peer's memory; peers in random order get the layers whose holders are slowest."""
    spans = np.zeros((costs.peers, 2), np.int64)
    speed_L = np.zeros(costs.layers)
    for peer in rng.permutation(costs.peers):
        best = (np.inf, 0, 0)
        for first in range(costs.layers):
            last = costs.reach(int(peer), first)
            if last > first:
                level = float(speed_L[first:last].mean()) * (1 + 0.02 * rng.random()) - 1e-9 * (last - first)
                best = min(best, (level, first, last))
        _, first, last = best
        spans[peer] = first, last
        if last > first:
            speed_L[first:last] += 1 / costs.seconds_NL[peer, first:last].sum()
    return spans


def repaired(costs: LayerCosts, spans: Ints) -> Ints:
    """Return a copy of the spans in which layers with too few holders get peers from layers with the most holders.

    The number of moves is limited, so the result may still not be valid.
    """
    spans = spans.copy()
    for _ in range(4 * costs.peers):
        held = max_flow.held(costs, spans).sum(axis=0)
        if (held >= costs.holders).all():
            break
        layer = int(np.argmin(held))
        spare = [
            (int(held[first:last].min()) if last > first else 99, peer)
            for peer, (first, last) in enumerate(spans)
            if costs.fits(peer, layer, layer + 1) and not first <= layer < last
        ]
        if not spare:
            break
        peer = max(spare)[1]
        spans[peer] = grown(costs, peer, layer, layer + 1)
    return spans


def mutated(costs: LayerCosts, spans: Ints, flow: MaxFlow, rng: np.random.Generator) -> Ints:
    """Return a copy of the spans with one mutation: a random peer, more often an idle peer, gets another span.

    The peer moves to scarce layers, shifts or resizes its span, or swaps spans with another peer.
    """
    child = spans.copy()
    idle = np.maximum(0.0, flow.idle_N) + 0.02
    peer = int(rng.choice(costs.peers, p=idle / idle.sum()))
    first, last = (int(edge) for edge in child[peer])
    match int(rng.integers(5)):
        case 0:
            weight = flow.price_L + 1e-3 * flow.price_L.max() + 1e-12
            layer = int(rng.choice(costs.layers, p=weight / weight.sum()))
            child[peer] = grown(costs, peer, max(0, layer - int(rng.integers(0, 3))), layer + 1)
        case 1:
            first = int(np.clip(first + rng.integers(-3, 4), 0, costs.layers - 1))
            child[peer] = first, costs.reach(peer, first)
        case 2:
            first = int(rng.integers(costs.layers))
            reach = costs.reach(peer, first)
            child[peer] = first, int(rng.integers(first, reach)) + 1 if reach > first else first
        case 3:
            other = int(rng.integers(costs.peers))
            taken = child[other].copy()
            child[other] = grown(costs, other, first, last) if last > first else (0, 0)
            child[peer] = grown(costs, peer, int(taken[0]), int(taken[1])) if taken[1] > taken[0] else (0, 0)
        case _:
            first, last = first + int(rng.integers(-1, 2)), last + int(rng.integers(-1, 2))
            first, last = max(0, first), min(costs.layers, last)
            if first < last and costs.fits(peer, first, last):
                child[peer] = first, last
    return child


def equal_random(costs: LayerCosts, rng: np.random.Generator) -> Ints:
    """Return the spans_N2 of the baseline "equal spans, random placement".

    The model is cut into the fewest equal stages that fit in every peer's memory, and each peer gets a random stage. If
    some peer cannot even hold a single layer, peers whose stage does not fit get no layers.
    """
    for stages in range(1, costs.layers + 1):
        cuts = np.round(np.linspace(0, costs.layers, stages + 1)).astype(np.int64)
        every = all(costs.fits(p, int(a), int(b)) for p in range(costs.peers) for a, b in itertools.pairwise(cuts))
        if every or stages == costs.layers:
            break
    stage_N = rng.permutation(costs.peers) % stages
    spans = np.stack((cuts[stage_N], cuts[stage_N + 1]), axis=1)
    fits = [costs.fits(peer, int(first), int(last)) for peer, (first, last) in enumerate(spans)]
    return np.where(np.array(fits)[:, None], spans, 0)


def spans_replan(
    costs: LayerCosts, region_N: Ints, old_N2: Ints, budget: SearchBudget, seed: int, seconds_ahead: float
) -> tuple[Ints, float]:
    """Return new spans_N2 after a change of the swarm, and the tokens that the swarm will train with these spans.

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
    patched = repaired(costs, _newcomers_placed(costs, kept))
    found = search(costs, region_N, budget, chance.arrays(seed, "replan"), first=patched)
    options = [spans for spans in (patched, found) if costs.valid(spans)] or [found]
    scored = [(tokens_ahead(costs, old_N2, spans, seconds_ahead), i) for i, spans in enumerate(options)]
    tokens, best = max(scored)
    return options[best], tokens


def tokens_ahead(costs: LayerCosts, old_N2: Ints, new_N2: Ints, seconds_ahead: float) -> float:
    """Return the tokens trained with new spans in `seconds_ahead` seconds; training waits for the slowest download."""
    pause = link_limits.download_s(costs, max_flow.held(costs, old_N2), max_flow.held(costs, new_N2))
    return max_flow.maximum(costs, new_N2).tokens_per_s * max(0.0, seconds_ahead - pause)


def _newcomers_placed(costs: LayerCosts, kept_N2: Ints) -> Ints:
    """Return a copy of the spans in which each peer without layers gets a span at the layer with the fewest holders."""
    placed = kept_N2.copy()
    for peer in np.flatnonzero(kept_N2[:, 0] >= kept_N2[:, 1]):
        layer = int(np.argmin(max_flow.held(costs, placed).sum(axis=0)))
        placed[peer] = grown(costs, int(peer), layer, layer + 1)
    return placed
