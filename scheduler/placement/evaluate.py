"""What a plan is (`SwarmPlan`), and what it is worth: evaluate plans and search for a better one (`evaluate_plans`).

An evaluation takes milliseconds for a handful of peers and seconds for a hundred, so a host runs it in a thread. The
evaluation uses the planner's cost model (scheduler/throughput/layer_costs.py), but with fragments in place of layers,
and with the memory needs of engine/memory.py.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgpack
import numpy as np
from pydantic import AfterValidator, Field, Strict, TypeAdapter

from decentral.comm.wire.message_fields import Index, Peer, Run, UnixTime
from decentral.core.ids import PeerId
from decentral.core.layer_work import UNMEASURED, KindCosts, shape_of, shares_of
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.plain_text import plain_text
from decentral.core.units import Seconds
from decentral.peers.membership import records
from decentral.scheduler.throughput.layer_costs import FETCHED_BYTES, ROUND_S, SNAPSHOT_BYTES, LayerCosts
from decentral.scheduler.throughput.link_limits import UNMEASURED_LINK, TokenLinks
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget

if TYPE_CHECKING:
    from decentral.scheduler.throughput.max_flow import MaxFlow

FIRST = 0  # micro-batches enter the model at the fragment with this index
HORIZON_S = 600.0  # a plan's worth is the number of tokens that the swarm trains in this time, less those lost to moves
SEARCH_ROUNDS = 100_000  # a search has SEARCH_ROUNDS / (peers * fragments ** 2) rounds, which take about one second
LEAST_ROUNDS = 10
DRAIN_COST_S = 5.0  # assumed loss of training time for each peer that moves, while it finishes its micro-batches
MOST_PLANNED_SPANS = 4096
MOST_PLANNED = 1024  # with more peers * fragments than this, no plans are made
USUAL_DELAY_S = 0.03  # assumed one-way delay of a link between two peers, which records do not tell
LEAST_TOKENS_PER_S = 1e-3  # assumed speed of a peer without a published speed, to avoid division by zero

PlanReason = Annotated[str, Strict(), Field(max_length=200), AfterValidator(partial(plain_text, most=200))]

Spans = tuple[tuple[str, int, int], ...]
"""A plan: peer ids, each with the fragments [begin, end) that the peer should hold."""


@dataclass(frozen=True, slots=True)
class TrainingPeer:
    """A peer that trains, as its record describes it."""

    held: range
    memory_bytes: int
    tokens_per_s: float  # speed at which the peer would train the whole model
    rate: float = 0.0  # bytes/s of the uplink; downlinks are seldom slower; 0 if not measured
    originates: bool = True
    lr_step: int = 1  # step of the learning-rate schedule; 0: its weights have not taken a step anywhere
    costs: KindCosts = UNMEASURED  # costs of the embedding, of a block and of the head on the peer's device
    changed: Seconds = 0.0  # when its speed or memory last changed much, by its own clock (`Profile.changed`)

    @property
    def has_trained(self) -> bool:
        """Return whether the peer's weights have taken a step, here or at the peer that sent them."""
        return self.lr_step > 0


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """A proposal of which peer should hold which fragments."""

    run: Run
    time: UnixTime
    reason: PlanReason
    # Each entry says that a peer should hold fragments [begin, end).
    spans: Annotated[tuple[tuple[Peer, Index, Index], ...], Field(max_length=MOST_PLANNED_SPANS)]
    # For each entry of `spans`, when that peer's speed or memory had last changed, as the proposer knew.
    changed: Annotated[tuple[UnixTime, ...], Field(max_length=MOST_PLANNED_SPANS)]

    def is_outdated(self, members: Mapping[PeerId, TrainingPeer]) -> bool:
        """Return whether the speed or memory of a peer of the plan has changed since the plan was made."""
        made_from = {PeerId(peer): changed for (peer, _, _), changed in zip(self.spans, self.changed, strict=True)}
        return any(members[peer].changed > made_from[peer] for peer in made_from.keys() & members.keys())

    def digest(self) -> str:
        """Return a digest of the whole plan, in hexadecimal."""
        return hashlib.blake2b(pack(self), digest_size=16).hexdigest()


_PLAN = TypeAdapter(SwarmPlan)


def pack(plan: SwarmPlan) -> bytes:
    """Return the bytes of a plan, which its proposer seals and stores in the DHT."""
    body: bytes = msgpack.packb(dataclasses.asdict(plan))
    return body


def unpack(body: bytes) -> SwarmPlan:
    """Return the plan in these bytes, which `pack` has made.

    Raises:
        ProtocolError: If the body is not a valid SwarmPlan.
    """
    return records.checked(_PLAN, body)


@dataclass(frozen=True, slots=True)
class PlanTask:
    """The inputs of an evaluation: the swarm as one peer knows it, and the costs of the model."""

    needs: MemoryNeeds
    members: tuple[tuple[PeerId, TrainingPeer], ...]  # sorted by peer id
    links: TokenLinks
    holders: int  # each fragment should keep at least this many holders


@dataclass(frozen=True, slots=True)
class EvaluatePlans:
    """Effect: evaluate these proposals in a thread, and return a PlansEvaluated with the same number."""

    number: int
    task: PlanTask
    proposals: tuple[Spans, ...]
    searches: bool  # whether to search for a better plan, too
    seed: int  # seed of the search


@dataclass(frozen=True, slots=True)
class PlansEvaluated:
    """Event: on how many tokens the swarm would train within HORIZON_S with each proposal of an EvaluatePlans."""

    number: int  # as in the EvaluatePlans
    stay_tokens: float  # the number of tokens if no peer moves
    proposed: tuple[float, ...]  # the number of tokens with each proposal, in order; 0 if it is impossible
    found: Spans = ()  # the best plan of a search; (): no search, or it found no plan
    found_tokens: float = 0.0  # the number of tokens with this plan
    moved: int = 0  # number of peers whose span this plan changes


@dataclass(frozen=True, slots=True, eq=False)
class FragmentCosts(LayerCosts):
    """The planner's cost model with fragments in place of layers; `needs` says how much memory a span of them takes."""

    needs: MemoryNeeds
    tokens_per_s: float
    tight: bool = False  # whether a search may use memory down to the least number of micro-batches in flight
    micro_batch_tokens: int = 0  # 0: do not count micro-batches in flight
    accumulate: int = 0  # least number of micro-batches in a step; 0: steps wait for none (`routes.overlap`)

    def reached(self, spans_N2: Ints, flow: "MaxFlow") -> float:
        """Return the tokens/s of a flow that memory for micro-batches in flight allows, with links of usual delays."""
        if not self.micro_batch_tokens or flow.tokens_per_s <= 0:
            return flow.tokens_per_s
        from decentral.scheduler.throughput import planned_in_flight, routes

        paths = [(share * flow.tokens_per_s, routes.without_return(hops)) for share, hops in routes.routes(flow)]
        delay_NN = np.full((self.peers, self.peers), USUAL_DELAY_S)
        pipeline = planned_in_flight.Pipeline(self, delay_NN, self.micro_batch_tokens, 1)
        spans = [(int(a), int(b)) for a, b in spans_N2]
        if self.accumulate:
            return float(planned_in_flight.in_rounds(pipeline, paths, spans, self.accumulate).sum())
        return float(pipeline.carried(paths, spans).sum())

    def compute_bound(self) -> float:
        """Return the sum of all peers' speeds in tokens/s, including peers that may not begin micro-batches."""
        return self.tokens_per_s

    def bytes_of(self, first: int, last: int, sequences: int) -> float:
        """Return the bytes that fragments [first, last) need; infinite for the whole model, to which no peer moves."""
        return self.needs.span_bytes(first, last) if last - first < self.layers else float("inf")

    def capacity(self, peer: int, first: int, last: int, sequences: int) -> int:
        """Return how many micro-batches a peer keeps beside fragments [first, last), as the peer itself counts."""
        return self.needs.capacity(first, last, int(self.memory_N[peer]))

    def reach(self, peer: int, first: int) -> int:
        """Return the end of the longest span from `first` that a search may give the peer; `first` if none fits.

        The flow does not count micro-batches in flight, so the search gives a peer layers beside which only the least
        number fits only if it fits no others, or if `tight`.
        """
        ends = range(min(self.layers, first + self.layers - 1), first, -1)  # no peer moves to the whole model
        return self.needs.end_of(first, ends, int(self.memory_N[peer]), self.tight)


def evaluate_plans(asked: EvaluatePlans) -> PlansEvaluated:
    """Return the worth of each proposal: the number of tokens on which the swarm would train within HORIZON_S.

    If `asked.searches`, a better plan is searched for too, unless no spans can hold all fragments. An impossible plan
    is worth 0 tokens. If the swarm exceeds MOST_PLANNED, all plans are worth 0 tokens.
    """
    from decentral.scheduler.throughput import covering, span_search  # slow to import (numba): do it in this thread

    task = asked.task
    count = len(task.members) * len(task.needs.fragments)
    if not task.members or len(task.needs.fragments) < 2 or count > MOST_PLANNED:
        return PlansEvaluated(asked.number, 0.0, tuple(0.0 for _ in asked.proposals))
    work = work_of(task)
    old = np.array([(one.held.start, one.held.stop) for _, one in task.members])
    stay = max(0.0, span_search.tokens_ahead(work, old, old, HORIZON_S))  # the solver's zero may be slightly negative
    proposed = tuple(_worth(task, work, old, _placed(task, old, spans)) for spans in asked.proposals)
    cover = covering.covering(work) if asked.searches and stay == 0 else None
    if asked.searches and stay == 0 and cover is None:
        cover = covering.covering(replace(work, tight=True))
    if not asked.searches or (stay == 0 and cover is None):
        return PlansEvaluated(asked.number, stay, proposed)
    rounds = max(LEAST_ROUNDS, SEARCH_ROUNDS // (count * len(task.needs.fragments)))
    nowhere, budget = np.zeros(len(old), np.int64), SearchBudget(rounds=rounds)
    start = old if cover is None else np.where((cover[:, 1] > cover[:, 0])[:, None], cover, old)
    new, _ = span_search.spans_replan(work, nowhere, start, budget, asked.seed, HORIZON_S)
    new = np.where((new[:, 1] > new[:, 0])[:, None], new, old)  # a peer without a span in the plan keeps its old span
    new, tokens = without_useless_moves(task, work, old, new, rounds)
    found = tuple((peer, int(a), int(b)) for (peer, _), (a, b) in zip(task.members, new, strict=True))
    moved = int((new != old).any(axis=1).sum())
    return PlansEvaluated(asked.number, stay, proposed, found if tokens else (), tokens, moved)


def work_of(task: PlanTask) -> FragmentCosts:
    """Return the costs with which the solver compares spans; arrays have the axes N (peers) and L (fragments)."""
    needs = task.needs
    parameters = np.array([one.parameters for one in needs.fragments], dtype=np.float64)
    speeds = np.array([max(LEAST_TOKENS_PER_S, _round(one.tokens_per_s)) for _, one in task.members])
    shares = [shares_of(needs.fragments, shape_of(needs.fragments, one.costs)) for _, one in task.members]
    seconds = np.array(shares) / speeds[:, None]
    seconds[[not one.originates for _, one in task.members], FIRST] = 1 / LEAST_TOKENS_PER_S
    rates = np.array([_round(one.rate) or UNMEASURED_LINK for _, one in task.members])
    links = np.minimum.outer(rates, rates)
    np.fill_diagonal(links, 0.0)
    held = _held([one.held for _, one in task.members], len(needs.fragments))
    return FragmentCosts(
        seconds_NL=seconds,
        state_L=np.array(needs.state_of_parts, dtype=np.float64),
        fetched_L=FETCHED_BYTES * parameters,
        activation_L=np.maximum(1.0, np.array(needs.activations, dtype=np.float64)),
        snapshot_L=SNAPSHOT_BYTES * parameters / ROUND_S,
        memory_N=np.array([float(one.memory_bytes) for _, one in task.members]),
        link_NN=links,
        hidden_bytes=task.links.hidden_bytes,
        holders=min(task.holders, max(1, min(held))),  # demand no more holders than the scarcest fragment has
        rate_N=rates,
        site_N=np.full(len(rates), -1),
        site_rate_Z=np.zeros(0),
        link_share=task.links.link_share,
        needs=needs,
        tokens_per_s=float(speeds.sum()),
        micro_batch_tokens=task.links.micro_batch_tokens,
        accumulate=task.links.accumulate,
    )


def _held(spans: Sequence[range], fragments: int) -> list[int]:
    """Return the number of holders of each fragment."""
    return [sum(index in span for span in spans) for index in range(fragments)]


def _worth(task: PlanTask, work: LayerCosts, old: Ints, new: Ints) -> float:
    """Return a plan's tokens within HORIZON_S, less the tokens lost while peers drain; 0.0 if it is impossible."""
    from decentral.scheduler.throughput import span_search

    if not work.valid(new):
        return 0.0
    drained = sum(one.tokens_per_s for (_, one), a, b in zip(task.members, old, new, strict=True) if (a != b).any())
    return max(0.0, span_search.tokens_ahead(work, old, new, HORIZON_S) - DRAIN_COST_S * drained)


def without_useless_moves(task: PlanTask, work: LayerCosts, old: Ints, new: Ints, most: int) -> tuple[Ints, float]:
    """Return the plan without moves that gain nothing, and its worth in tokens; check up to `most` moves.

    A peer keeps its layers if that is no worse. If another peer was to get these, that peer moves in its place.
    """
    best = _worth(task, work, old, new)
    for peer in np.flatnonzero((new != old).any(axis=1))[:most]:
        takers = np.flatnonzero((new == old[peer]).all(axis=1) & (new != old).any(axis=1))
        for instead in (takers[:0], takers[:1]):
            fewer = new.copy()
            fewer[instead], fewer[peer] = new[peer], old[peer]
            worth = _worth(task, work, old, fewer)
            if worth >= best:
                new, best = fewer, worth
                break
    return new, best


def _placed(task: PlanTask, old: Ints, spans: Spans) -> Ints:
    """Return the spans of a proposal as a (peers, 2) array; a peer that the proposal does not name keeps its span."""
    named = {peer: (begin, end) for peer, begin, end in spans}
    return np.array([named.get(peer, tuple(old[at])) for at, (peer, _) in enumerate(task.members)])


def _round(value: float) -> float:
    """Round to two significant digits, the precision of measurements."""
    return float(f"{value:.1e}")
