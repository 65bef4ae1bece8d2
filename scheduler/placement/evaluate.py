"""What plans are worth, and a search for a better one, by the scheduler's replanner; pure functions.

`evaluate_plans` takes from milliseconds (a handful of peers) to seconds (a hundred), so a host runs it in a thread. The
scheduler's layers are fragments here: spans are whole fragments, and memory is what engine/memory.py says.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decentral.core.ids import PeerId
from decentral.core.memory_needs import MemoryNeeds
from decentral.scheduler.throughput.layer_costs import FETCHED_BYTES, ROUND_S, SNAPSHOT_BYTES, LayerCosts
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget

FIRST = 0  # the fragment at which micro-batches begin
HORIZON_S = 600.0  # within which a plan has to pay, its moves included
SEARCH_ROUNDS = 100_000  # rounds of a search, times peers and fragments squared: about a second
LEAST_ROUNDS = 10  # least rounds of a search, which takes longer in a large swarm
DRAIN_COST_S = 5.0  # computing that a move costs its peer
MOST_PLANNED = 1024  # peers times fragments; a larger swarm makes no plans
LEAST_TOKENS_PER_S = 1e-3  # of a peer that computes nothing
UNMEASURED_LINK = 12.5e6  # bytes/s of a link that was not measured yet, as in scheduler/topology/topology.py

Spans = tuple[tuple[str, int, int], ...]
"""Peers, each with its fragments [begin, end)."""


@dataclass(frozen=True, slots=True)
class TrainingPeer:
    """A peer that trains, as its record describes it."""

    held: range  # fragments
    memory_bytes: int  # memory for the model
    tokens_per_s: float  # speed, if it computed the whole model
    rate: float = 0.0  # bytes/s, the lesser of up and down; 0: not measured yet
    originates: bool = True  # whether it may train on data of its own, and so begin micro-batches


@dataclass(frozen=True, slots=True)
class PlanTask:
    """The swarm as one peer knows it."""

    needs: MemoryNeeds
    members: tuple[tuple[PeerId, TrainingPeer], ...]  # in the order of their ids
    hidden_bytes: float  # size of a token's hidden state between two layers
    holders: int  # number of holders that each fragment should have

    def digest(self) -> bytes:
        """Names the topology that a plan is made for: all measurements, rounded to two digits."""
        facts = [(peer, one.memory_bytes, _round(one.tokens_per_s), _round(one.rate)) for peer, one in self.members]
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class EvaluatePlans:
    """Effect: find what these proposals are worth. Its outcome is PlansEvaluated with the same number."""

    number: int
    task: PlanTask
    proposals: tuple[Spans, ...]
    searches: bool  # whether to search for a better plan as well
    seed: int


@dataclass(frozen=True, slots=True)
class PlansEvaluated:
    """Event: the tokens that the swarm would train within HORIZON_S."""

    number: int
    topology: bytes
    stay_tokens: float  # tokens if all peers stay where they are
    proposed: tuple[float, ...]  # tokens with each proposal; 0 for one that is impossible
    found: Spans = ()  # the plan that the search has found
    found_tokens: float = 0.0  # tokens with that plan
    moved: int = 0  # peers that have to move for that plan


@dataclass(frozen=True, slots=True, eq=False)
class FragmentCosts(LayerCosts):
    """The scheduler's costs, with fragments as layers and the memory model of a run."""

    needs: MemoryNeeds
    tokens_per_s: float  # of all devices together

    def compute_bound(self) -> float:
        """Sum of speeds: a donor-only peer's infinite first fragment must not count."""
        return self.tokens_per_s

    def bytes_of(self, first: int, last: int, sequences: int) -> float:
        """Infinite for the whole model: no peer moves to it (scheduler/placement/move.py)."""
        return self.needs.span_bytes(first, last) if last - first < self.layers else float("inf")


def evaluate_plans(asked: EvaluatePlans) -> PlansEvaluated:
    """Raises nothing: a plan that is impossible, or a swarm too large to plan for, is worth 0 tokens."""
    from decentral.scheduler.throughput import span_search  # loads numba: only where peers plan, in the host's thread

    task = asked.task
    count = len(task.members) * len(task.needs.fragments)
    if not task.members or len(task.needs.fragments) < 2 or count > MOST_PLANNED:
        return PlansEvaluated(asked.number, task.digest(), 0.0, tuple(0.0 for _ in asked.proposals))
    work = work_of(task)
    old = np.array([(one.held.start, one.held.stop) for _, one in task.members])
    stay = max(0.0, span_search.tokens_ahead(work, old, old, HORIZON_S))  # the solver's zero may be slightly negative
    proposed = tuple(_worth(task, work, old, _placed(task, old, spans)) for spans in asked.proposals)
    if not asked.searches:
        return PlansEvaluated(asked.number, task.digest(), stay, proposed)
    rounds = max(LEAST_ROUNDS, SEARCH_ROUNDS // (count * len(task.needs.fragments)))
    nowhere, budget = np.zeros(len(old), np.int64), SearchBudget(rounds=rounds)
    new, _ = span_search.spans_replan(work, nowhere, old, budget, asked.seed, HORIZON_S)
    new = np.where((new[:, 1] > new[:, 0])[:, None], new, old)  # peers that the plan does not need stay
    new, tokens = _without_useless_moves(task, work, old, new, rounds)
    found = tuple((peer, int(a), int(b)) for (peer, _), (a, b) in zip(task.members, new, strict=True))
    moved = int((new != old).any(axis=1).sum())
    return PlansEvaluated(asked.number, task.digest(), stay, proposed, found if tokens else (), tokens, moved)


def work_of(task: PlanTask) -> FragmentCosts:
    """The task as the scheduler takes it. Axes: N peers, L fragments."""
    needs = task.needs
    parameters = np.array([one.parameters for one in needs.fragments], dtype=np.float64)
    speeds = np.array([max(LEAST_TOKENS_PER_S, _round(one.tokens_per_s)) for _, one in task.members])
    seconds = parameters / parameters.sum() / speeds[:, None]
    seconds[[not one.originates for _, one in task.members], FIRST] = 1 / LEAST_TOKENS_PER_S
    rates = np.array([_round(one.rate) or UNMEASURED_LINK for _, one in task.members])
    links = np.minimum.outer(rates, rates)
    np.fill_diagonal(links, 0.0)
    held = _held([one.held for _, one in task.members], len(needs.fragments))
    return FragmentCosts(
        seconds_NL=seconds,
        state_L=np.array(needs.state_of_parts, dtype=np.float64),
        fetched_L=FETCHED_BYTES * parameters,
        activation_L=np.array(needs.activations, dtype=np.float64),
        snapshot_L=SNAPSHOT_BYTES * parameters / ROUND_S,
        memory_N=np.array([float(one.memory_bytes) for _, one in task.members]),
        link_NN=links,
        hidden_bytes=task.hidden_bytes,
        holders=min(task.holders, max(1, min(held))),  # a plan need not raise the number of holders
        needs=needs,
        tokens_per_s=float(speeds.sum()),
    )


def _held(spans: Sequence[range], fragments: int) -> list[int]:
    """The number of holders of each fragment."""
    return [sum(index in span for span in spans) for index in range(fragments)]


def reachable(old: Ints, new: Ints, fragments: int, holders: int) -> bool:
    """Whether the peers can move one after another so that each given-up fragment keeps `holders` other holders.

    `old` and `new`: int [peers, 2], each row the fragments [begin, end) of a peer.
    """
    now = [range(a, b) for a, b in old]
    targets = [range(a, b) for a, b in new]
    held = _held(now, fragments)
    waiting = [peer for peer, target in enumerate(targets) if target != now[peer]]
    while waiting:
        able = (p for p in waiting if all(held[i] > holders for i in now[p] if i not in targets[p]))
        if (peer := next(able, None)) is None:
            return False
        for index in range(fragments):
            held[index] += (index in targets[peer]) - (index in now[peer])
        now[peer] = targets[peer]
        waiting.remove(peer)
    return True


def _worth(task: PlanTask, work: LayerCosts, old: Ints, new: Ints) -> float:
    """Tokens within HORIZON_S, less what movers do not train while they drain; 0 for a plan that cannot be reached."""
    from decentral.scheduler.throughput import span_search

    if not work.valid(new) or not reachable(old, new, work.layers, task.holders):
        return 0.0
    drained = sum(one.tokens_per_s for (_, one), a, b in zip(task.members, old, new, strict=True) if (a != b).any())
    return max(0.0, span_search.tokens_ahead(work, old, new, HORIZON_S) - DRAIN_COST_S * drained)


def _without_useless_moves(task: PlanTask, work: LayerCosts, old: Ints, new: Ints, most: int) -> tuple[Ints, float]:
    """The plan without moves that gain nothing, of which `most` are tried; and its worth in tokens."""
    best = _worth(task, work, old, new)
    for peer in np.flatnonzero((new != old).any(axis=1))[:most]:
        fewer = new.copy()
        fewer[peer] = old[peer]
        worth = _worth(task, work, old, fewer)
        if worth >= best:
            new, best = fewer, worth
    return new, best


def _placed(task: PlanTask, old: Ints, spans: Spans) -> Ints:
    """A proposal as an array. Peers that it does not name stay; peers that we do not know are left out."""
    named = {peer: (begin, end) for peer, begin, end in spans}
    return np.array([named.get(peer, tuple(old[at])) for at, (peer, _) in enumerate(task.members)])


def _round(value: float) -> float:
    """Two digits: measurements are no better."""
    return float(f"{value:.1e}")
