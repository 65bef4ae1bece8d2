"""What plans are worth, and a search for a better one, by the scheduler's own replanner; pure functions.

`weigh` takes from milliseconds (a handful of peers) to seconds (a hundred), and changes nothing: a host runs it in a
thread. Fragments stand for the scheduler's layers: spans are whole fragments, and memory is what train/memory.py says.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decentral.core.ids import PeerId
from decentral.core.memory_needs import MemoryNeeds
from decentral.peers.placement.layer_recovery import TrainingPeer
from decentral.scheduler.shared.arrays import Ints
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.throughput.layer_costs import ROUND_S, SNAPSHOT_BYTES, LayerCosts

HORIZON_S = 600.0  # a plan has to pay within this time, its moves included
SEARCH_ROUNDS = 100_000  # of a search, over peers times fragments squared: a second or so ...
LEAST_ROUNDS = 10  # ... and more in a large swarm
DRAIN_COST_S = 5.0  # of a mover's computing that a move costs
MOST = 1024  # peers times fragments; a larger swarm makes no plans
UNMEASURED = 12.5e6  # bytes/s of a link that was not measured yet, as in scheduler/shared/topology.py

Spans = tuple[tuple[str, int, int], ...]
"""Peer, and its fragments [begin, end)."""


@dataclass(frozen=True, slots=True)
class PlanTask:
    """The swarm as one peer knows it, in the order of peer ids. `hidden_bytes`: of a token between two layers."""

    needs: MemoryNeeds
    members: tuple[tuple[PeerId, TrainingPeer], ...]
    hidden_bytes: float
    holders: int

    def digest(self) -> bytes:
        """Of what was measured, to two digits: the topology that a plan was made for."""
        facts = [(peer, one.memory_bytes, _round(one.tokens_per_s), _round(one.rate)) for peer, one in self.members]
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class EvaluatePlans:
    """Effect: what are these proposals worth, and, if we search, is there a better one? The outcome is PlansEvaluated."""

    number: int
    task: PlanTask
    proposals: tuple[Spans, ...]
    searches: bool
    seed: int


@dataclass(frozen=True, slots=True)
class PlansEvaluated:
    """Event. Tokens within HORIZON_S: if all stay, of each proposal (0: it cannot be), and of what was found."""

    number: int
    topology: bytes
    stay_tokens: float
    proposed: tuple[float, ...]
    found: Spans = ()
    found_tokens: float = 0.0
    moved: int = 0  # peers that what was found would move


@dataclass(frozen=True, slots=True, eq=False)
class FragmentCosts(LayerCosts):
    """The scheduler's Work, with fragments for layers and our own memory model."""

    needs: MemoryNeeds

    def bytes_of(self, first: int, last: int, sequences: int) -> float:
        """A part never becomes the whole: that would train in another way (peers/placement/span_move.py)."""
        return self.needs.span_bytes(first, last) if last - first < self.layers else float("inf")


def evaluate_plans(asked: EvaluatePlans) -> PlansEvaluated:
    from decentral.scheduler.throughput import (
        replan,  # loads numba: here, in its thread, and only where peers plan
    )

    task = asked.task
    count = len(task.members) * len(task.needs.fragments)
    proposed = tuple(0.0 for _ in asked.proposals)
    if not task.members or len(task.needs.fragments) < 2 or count > MOST:
        return PlansEvaluated(asked.number, task.digest(), 0.0, proposed)
    work = work_of(task)
    old = np.array([(one.held.start, one.held.stop) for _, one in task.members])
    stay = max(0.0, replan.tokens_ahead(work, old, old, HORIZON_S))  # a solver's zero may be a little less
    proposed = tuple(_worth(task, work, old, _placed(task, old, spans)) for spans in asked.proposals)
    if not asked.searches:
        return PlansEvaluated(asked.number, task.digest(), stay, proposed)
    rounds = max(LEAST_ROUNDS, SEARCH_ROUNDS // (count * len(task.needs.fragments)))
    new, _ = replan.spans_replan(
        work, np.zeros(len(old), np.int64), old, SearchBudget(rounds=rounds), asked.seed, HORIZON_S
    )
    new = np.where((new[:, 1] > new[:, 0])[:, None], new, old)  # who is not needed stays where it is
    new, tokens = _spared(task, work, old, new, rounds)
    found = tuple((peer, int(a), int(b)) for (peer, _), (a, b) in zip(task.members, new, strict=True))
    moved = int((new != old).any(axis=1).sum())
    return PlansEvaluated(asked.number, task.digest(), stay, proposed, found if tokens else (), tokens, moved)


def work_of(task: PlanTask) -> FragmentCosts:
    needs = task.needs
    parameters = np.array([one.parameters for one in needs.fragments], dtype=np.float64)
    speeds = np.array([max(1e-3, _round(one.tokens_per_s)) for _, one in task.members])
    rates = np.array([_round(one.rate) or UNMEASURED for _, one in task.members])
    links = np.minimum.outer(rates, rates)
    np.fill_diagonal(links, 0.0)
    held = _held([one.held for _, one in task.members], len(needs.fragments))
    return FragmentCosts(
        seconds_NL=parameters / parameters.sum() / speeds[:, None],
        state_L=np.array(needs.state, dtype=np.float64),
        activation_L=np.array(needs.activations, dtype=np.float64),
        snapshot_L=SNAPSHOT_BYTES * parameters / ROUND_S,
        memory_N=np.array([float(one.memory_bytes) for _, one in task.members]),
        link_NN=links,
        hidden_bytes=task.hidden_bytes,
        holders=min(task.holders, max(1, min(held))),  # no plan has to mend what is so already
        needs=needs,
    )


def _held(spans: Sequence[range], fragments: int) -> list[int]:
    """How many hold each fragment."""
    return [sum(index in span for span in spans) for index in range(fragments)]


def reachable(old: Ints, new: Ints, fragments: int, holders: int) -> bool:
    """Whether the peers can move one after another without a fragment falling below so many other holders."""
    now = [range(a, b) for a, b in old]
    goals = [range(a, b) for a, b in new]
    held = _held(now, fragments)
    waiting = [peer for peer, goal in enumerate(goals) if goal != now[peer]]
    while waiting:
        able = (p for p in waiting if all(held[i] > holders for i in now[p] if i not in goals[p]))
        peer = next(able, None)
        if peer is None:
            return False
        for index in range(fragments):
            held[index] += (index in goals[peer]) - (index in now[peer])
        now[peer] = goals[peer]
        waiting.remove(peer)
    return True


def _worth(task: PlanTask, work: LayerCosts, old: Ints, new: Ints) -> float:
    """Tokens ahead, less what the movers do not train while they drain; 0 if memory, coverage or the way forbid it."""
    from decentral.scheduler.throughput import replan

    if not work.valid(new) or not reachable(old, new, work.layers, task.holders):
        return 0.0
    drained = sum(one.tokens_per_s for (_, one), a, b in zip(task.members, old, new, strict=True) if (a != b).any())
    return max(0.0, replan.tokens_ahead(work, old, new, HORIZON_S) - DRAIN_COST_S * drained)


def _spared(task: PlanTask, work: LayerCosts, old: Ints, new: Ints, most: int) -> tuple[Ints, float]:
    """The same with moves left out that bring nothing, as far as so many tries go; and its worth."""
    best = _worth(task, work, old, new)
    for peer in np.flatnonzero((new != old).any(axis=1))[:most]:
        fewer = new.copy()
        fewer[peer] = old[peer]
        worth = _worth(task, work, old, fewer)
        if worth >= best:
            new, best = fewer, worth
    return new, best


def _placed(task: PlanTask, old: Ints, spans: Spans) -> Ints:
    """A proposal as an array: whom it does not name stays, whom we do not know is not counted on."""
    named = {peer: (begin, end) for peer, begin, end in spans}
    return np.array([named.get(peer, tuple(old[at])) for at, (peer, _) in enumerate(task.members)])


def _round(value: float) -> float:
    """To two digits: measurements are no better."""
    return float(f"{value:.1e}")


__all__ = [
    "HORIZON_S",
    "Spans",
    "PlanTask",
    "EvaluatePlans",
    "PlansEvaluated",
    "reachable",
    "evaluate_plans",
    "work_of",
]
