"""Which layers each peer holds, for the greatest throughput: a memetic search over spans, and an exact one.

A peer whose memory takes the whole model is free to hold all of it. Otherwise peers start as a chain in each group
of regions whose memory takes the model: cut points follow the devices' speed (so that all finish together), and
every span then grows to what the memory allows, because overlap lets the flow balance what whole layers cannot.
The search moves, swaps, grows and shrinks spans of idle peers towards layers that are scarce; every child is
judged by its flow (flow.py). Small swarms are then solved exactly (mixed-integer programme, HiGHS).
"""

import itertools

import numpy as np

from decentral.scheduler.shared.arrays import Ints
from decentral.scheduler.shared.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.throughput import max_flow, milp
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.max_flow import FlowSolver, MaxFlow

SMALL_SWARM = 250  # possible spans of all peers together: below this the exact solver finishes the search
DRAWS = 12  # random fillings beside the chains
SEARCH_PATIENCE = 12  # children without gain, per peer, before the search goes elsewhere
MOST_RESTARTS = 30


def search(
    work: LayerCosts, region_N: Ints, budget: SearchBudget, rng: np.random.Generator, first: Ints | None = None
) -> Ints:
    """Spans N x 2 of the best throughput found. `first`: spans to begin with (replanning)."""
    small = milp.options(work) <= SMALL_SWARM
    progress, flows = SearchProgress(budget.part(0.5) if small else budget, np.inf), FlowSolver(work)
    starts = [first] if first is not None else []
    starts += [chains(work, groups, rng) for groups in groupings(work, region_N)]
    starts += [fill(work, rng) for _ in range(DRAWS if work.peers <= 16 else 2)]
    starts = [spans if work.valid(spans) else repaired(work, spans) for spans in starts]
    judged: list[tuple[MaxFlow, Ints]] = []
    flow_s = 0.0  # the longest that one took so far: what is begun is finished
    for spans in starts:
        if not judged or not progress.late(flow_s):
            begin = progress.seconds()
            judged.append((flows.maximum(spans), spans))
            flow_s = max(flow_s, progress.seconds() - begin)
    best = here = max(judged, key=lambda pair: (work.valid(pair[1]), pair[0].tokens_per_s))
    stuck, walked = 0, 0
    while progress.goes_on(flow_s) and best[0].tokens_per_s < work.compute_bound() * (1 - 1e-9):
        if stuck > SEARCH_PATIENCE * work.peers:
            if walked > MOST_RESTARTS:
                break
            here = _restart(flows, best[1], rng)
            stuck, walked = 0, walked + 1
        child = mutated(work, here[1], here[0], rng)
        stuck += 1
        if work.valid(child):
            begin = progress.seconds()
            found = flows.maximum(child)
            flow_s = max(flow_s, progress.seconds() - begin)
            if found.tokens_per_s > here[0].tokens_per_s * (1 + 1e-9):
                stuck = 0
            if found.tokens_per_s > here[0].tokens_per_s * (1 - 1e-9):  # equal ones too: a walk along the plateau
                here = (found, child)
            if found.tokens_per_s > best[0].tokens_per_s:
                best = here
        progress.report(-best[0].tokens_per_s)
    return _finished(work, best[1], best[0].tokens_per_s, budget) if small else best[1]


def _restart(flows: FlowSolver, best: Ints, rng: np.random.Generator) -> tuple[MaxFlow, Ints]:
    """Somewhere else: half of the time the best with a few spans let go, else a new random filling."""
    work = flows.work
    spans = fill(work, rng)
    if rng.random() < 0.5:
        kept = rng.random(work.peers) < 0.7
        spans = np.where(kept[:, None], best, spans)
    spans = spans if work.valid(spans) else repaired(work, spans)
    spans = spans if work.valid(spans) else best
    return flows.maximum(spans), spans


def _finished(work: LayerCosts, spans: Ints, tokens_per_s: float, budget: SearchBudget) -> Ints:
    """A small swarm's proven optimum, where that is better; any other swarm's spans as they are."""
    if tokens_per_s < work.compute_bound() * (1 - 1e-9):
        exact = milp.best_spans(work, budget.seconds / 2)
        if exact is not None and max_flow.maximum(work, exact).tokens_per_s > tokens_per_s:
            return exact
    return spans


def groupings(work: LayerCosts, region_N: Ints) -> list[list[Ints]]:
    """Ways to cut the swarm into groups that can each hold the model: one, and regions joined by their links."""
    everyone = [np.arange(work.peers)]
    groups = [np.flatnonzero(region_N == region) for region in range(int(region_N.max()) + 1)]
    ways = [everyone, [np.array([peer]) for peer in everyone[0]]]
    while len(groups) > 1:
        weak = [group for group in groups if not _enough(work, group)]
        if not weak:
            ways.append(groups)
            break
        smallest = min(weak, key=lambda group: float(work.memory_N[group].sum()))
        others = [group for group in groups if group is not smallest]
        near = max(range(len(others)), key=lambda i: float(work.link_NN[np.ix_(smallest, others[i])].max()))
        others[near] = np.concatenate((others[near], smallest))
        groups = others
    return ways


def _enough(work: LayerCosts, group: Ints) -> bool:
    return float(work.memory_N[group].sum()) > 1.25 * float(work.state_L.sum())


def chains(work: LayerCosts, groups: list[Ints], rng: np.random.Generator) -> Ints:
    """In each group a chain of peers, the largest memory first; each peer's share of the layers as its speed's."""
    spans = np.zeros((work.peers, 2), np.int64)
    cost_L = work.seconds_NL[0] / work.seconds_NL[0].sum()
    edges = np.concatenate(([0.0], np.cumsum(cost_L)))
    for group in groups:
        order = group[np.argsort(-work.memory_N[group], kind="stable")]
        order = order if rng.random() < 0.5 else order[::-1]
        speed = 1 / work.seconds_NL[order].sum(axis=1)
        ends = np.concatenate(([0.0], np.cumsum(speed) / speed.sum()))
        for peer, begin, end in zip(order, ends, ends[1:], strict=False):
            first = min(int(np.searchsorted(edges, begin + 1e-9, side="right")) - 1, work.layers - 1)
            last = max(first + 1, int(np.searchsorted(edges, end - 1e-9)))
            spans[peer] = grown(work, int(peer), first, min(last, work.layers))
    return spans


def grown(work: LayerCosts, peer: int, first: int, last: int) -> tuple[int, int]:
    """The span cut or widened, to both sides in turn, to what the peer's memory takes."""
    while last > first + 1 and not work.fits(peer, first, last):
        last -= 1
    if not work.fits(peer, first, last):
        return 0, 0
    more = True
    while more:
        more = False
        if last < work.layers and work.fits(peer, first, last + 1):
            last, more = last + 1, True
        if first > 0 and work.fits(peer, first - 1, last):
            first, more = first - 1, True
    return first, last


def fill(work: LayerCosts, rng: np.random.Generator) -> Ints:
    """Peers in random order, each where layers have the least speed behind them, as wide as it fits."""
    spans = np.zeros((work.peers, 2), np.int64)
    behind_L = np.zeros(work.layers)
    for peer in rng.permutation(work.peers):
        best = (np.inf, 0, 0)
        for first in range(work.layers):
            last = work.reach(int(peer), first)
            if last > first:
                level = float(behind_L[first:last].mean()) * (1 + 0.02 * rng.random()) - 1e-9 * (last - first)
                best = min(best, (level, first, last))
        _, first, last = best
        spans[peer] = first, last
        if last > first:
            behind_L[first:last] += 1 / work.seconds_NL[peer, first:last].sum()
    return spans


def repaired(work: LayerCosts, spans: Ints) -> Ints:
    """The spans moved so that every layer has its holders; first fit, largest memories last."""
    spans = spans.copy()
    for _ in range(4 * work.peers):
        held = max_flow.held(work, spans).sum(axis=0)
        if (held >= work.holders).all():
            break
        layer = int(np.argmin(held))
        surplus = [
            (int(held[first:last].min()) if last > first else 99, peer)
            for peer, (first, last) in enumerate(spans)
            if work.fits(peer, layer, layer + 1) and not first <= layer < last
        ]
        if not surplus:
            break
        peer = max(surplus)[1]
        spans[peer] = grown(work, peer, layer, layer + 1)
    return spans


def mutated(work: LayerCosts, spans: Ints, best: MaxFlow, rng: np.random.Generator) -> Ints:
    """A child: an idle peer moves to scarce layers, or shifts, resizes, or swaps places with another."""
    child = spans.copy()
    idle = best.idle_N + 0.02
    peer = int(rng.choice(work.peers, p=idle / idle.sum()))
    first, last = (int(edge) for edge in child[peer])
    match int(rng.integers(5)):
        case 0:
            weight = best.price_L + 1e-3 * best.price_L.max() + 1e-12
            layer = int(rng.choice(work.layers, p=weight / weight.sum()))
            child[peer] = grown(work, peer, max(0, layer - int(rng.integers(0, 3))), layer + 1)
        case 1:
            first = int(np.clip(first + rng.integers(-3, 4), 0, work.layers - 1))
            child[peer] = first, work.reach(peer, first)
        case 2:
            first = int(rng.integers(work.layers))
            reach = work.reach(peer, first)
            child[peer] = first, int(rng.integers(first, reach)) + 1 if reach > first else first
        case 3:
            other = int(rng.integers(work.peers))
            theirs = child[other].copy()
            child[other] = grown(work, other, first, last) if last > first else (0, 0)
            child[peer] = grown(work, peer, int(theirs[0]), int(theirs[1])) if theirs[1] > theirs[0] else (0, 0)
        case _:
            first, last = first + int(rng.integers(-1, 2)), last + int(rng.integers(-1, 2))
            first, last = max(0, first), min(work.layers, last)
            if first < last and work.fits(peer, first, last):
                child[peer] = first, last
    return child


def equal_random(work: LayerCosts, rng: np.random.Generator) -> Ints:
    """The baseline "equal spans, random placement": as many equal stages as the smallest device needs."""
    for stages in range(1, work.layers + 1):
        cuts = np.round(np.linspace(0, work.layers, stages + 1)).astype(np.int64)
        every = all(work.fits(p, int(a), int(b)) for p in range(work.peers) for a, b in itertools.pairwise(cuts))
        if every or stages == work.layers:
            break
    place = rng.permutation(work.peers) % stages
    spans = np.stack((cuts[place], cuts[place + 1]), axis=1)
    for peer in range(work.peers):
        if not work.fits(peer, *map(int, spans[peer])):
            spans[peer] = 0
    return spans
