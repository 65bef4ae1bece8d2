"""Bound what routes carry by memory for micro-batches in flight, and by steps that wait for them.

Start reading at `Flights.carried`.

A peer stores a micro-batch's activations from its arrival until its backward pass here, while it waits and is computed
here and at all later peers of its route, and while links carry it there and back. On a route r, hop h keeps it for

    kept_rh = sum over hops k >= h of 2 passes_k  +  sum over links behind h of (2 delay + 2 transfer_s(bytes, rate))

where a micro-batch waits for a device as long as it computes there, since a device is always busy only if work waits.
By Little's law, the tokens/s x_r on the routes of a flow are limited by the micro-batches that fit beside the layers:

    maximise sum_r x_r   with   x_r <= flow_r   and   sum_rh x_r / tokens * kept_rh <= capacity_j   for every peer j

With exact gradients, each peer of a route stops for its step until its micro-batches are back and committed, and the
peers stop at different times: `with_steps`, in plans for a topology. Running peers rank layouts by `in_rounds`.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from decentral.comm.pipeline.execution_table import MOST_AWAITED, PATIENT_STEPS, PATIENT_TIMES
from decentral.comm.wire.slow_start import transfer_s
from decentral.core.config import Config
from decentral.core.jobs import MOST_UNDER_WAY
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.link_limits import beside_gossip
from decentral.scheduler.throughput.max_flow import NEAREST
from decentral.scheduler.throughput.routes import Hop
from decentral.scheduler.topology.arrays import Floats, Ints

WAITING = 1.0  # a micro-batch waits for a device this many times as long as it computes there
# The same for a device of several origin peers that always computes or pauses for steps. The queue of a device that is
# idle at times is shorter: it is multiplied by the square of the share of busy time. Measured with tight_swarms.
WAITING_FOR_STEPS = 4.0
BESIDE_STEPS = (
    0.7  # share of their flow that origin peers on others' routes carry beside pauses for steps; measured, too
)
JOBS_S = 0.003  # beside computing, a hop takes this long for the jobs of a micro-batch: two passes and a step
LOST_SHARE = 0.02  # the largest micro-batches are planned whose throughput is at most this share below that of the best
TRIED_SHARE = 0.1  # larger micro-batches are not tried once a size lowers the best throughput by more than this share
SIZES = tuple(1 << power for power in range(7))  # sequences in a micro-batch, up to MOST_PLANNED_SEQUENCES
Path = tuple[float, list[Hop]]
"""The tokens/s on a route, and its hops."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The time and memory that micro-batches of one size take at the peers and on the links of their routes."""

    costs: LayerCosts
    delay_NN: Floats  # delay of each link in one direction, in seconds
    context: int  # number of tokens in a sequence
    sequences: int  # number of sequences in a micro-batch

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a micro-batch."""
        return self.sequences * self.context

    def passes_s(self, hop: Hop) -> float:
        """Return the seconds in which a hop computes both passes of a micro-batch."""
        peer, first, last = hop
        return JOBS_S + self.tokens * float(self.costs.seconds_NL[peer, first:last].sum())

    def link_s(self, sender: int, receiver: int, gossip: float = 0.0) -> float:
        """Return the seconds to send activations to a peer, and to get their gradient back, if nothing waits.

        Each transfer begins with TCP slow start, as connections lose their windows while they are idle.

        Args:
            sender: Peer with the activations.
            receiver: Peer that gets them.
            gossip: Bytes/s of the gossip that both peers' own links carry beside them.
        """
        costs = self.costs
        access = min(costs.rate_N[sender], costs.rate_N[receiver])
        rate = min(costs.link_NN[sender, receiver], float(beside_gossip(access, gossip, costs.link_share)))
        round_trip_s = float(self.delay_NN[sender, receiver] + self.delay_NN[receiver, sender])
        size = int(self.tokens * costs.hidden_bytes)
        return round_trip_s + 2 * transfer_s(size, float(rate), round_trip_s)

    def kept_s(self, hops: Sequence[Hop], waiting: Floats | float = WAITING) -> list[float]:
        """Return, for each hop of a route, the seconds for which a micro-batch occupies the hop's memory.

        Args:
            hops: The route.
            waiting: A micro-batch waits for a device this many times as long as it computes there; one number for all
                peers, or one for each.
        """
        waiting_N = np.broadcast_to(waiting, self.costs.peers)
        links = [
            self.link_s(one[0], next_one[0], max(map(self._gossip, (one, next_one))))
            for one, next_one in itertools.pairwise(hops)
        ]
        each = [
            (1 + float(waiting_N[hop[0]])) * self.passes_s(hop) + link
            for hop, link in zip(hops, [*links, 0.0], strict=True)
        ]
        return list(itertools.accumulate(reversed(each)))[::-1]

    def _gossip(self, hop: Hop) -> float:
        """Return the bytes/s of gossip about the layers of a hop."""
        _, first, last = hop
        return float(self.costs.snapshot_L[first:last].sum())

    def capacity(self, hop: Hop, held: tuple[int, int]) -> float:
        """Return how many micro-batches a peer can keep for this hop if it holds the layers `held`.

        The number is as a running peer counts (`LayerCosts.capacity` and `StageConfig.memory_share`): each micro-batch
        takes a place as large as one through all layers of the peer; a hop through fewer layers takes a part of it.
        """
        peer, first, last = hop
        activation_L, places = self.costs.activation_L, self.costs.capacity(peer, held[0], held[1], self.sequences)
        larger = float(activation_L[held[0] : held[1]].sum() / activation_L[first:last].sum())
        return min(MOST_UNDER_WAY, places * larger)

    def carried(
        self,
        paths: Sequence[Path],
        spans_N2: Sequence[tuple[int, int]],
        waiting: Floats | float = WAITING,
        slower_N: Floats | None = None,
    ) -> Floats:
        """Return the tokens/s on each route that devices and memory allow; the sum is as large as possible.

        Args:
            paths: The routes, with the tokens/s that each may carry at most.
            spans_N2: Each peer's layers.
            waiting: As in `kept_s`.
            slower_N: The result of `_slower_by_pauses`; None: no device pauses.
        """
        rates, peers = np.array([rate for rate, _ in paths]), self.costs.peers
        slower_N = np.ones(peers) if slower_N is None else slower_N
        uses = [  # (row, route, share of the row's limit that a token/s takes)
            use
            for route, (_, hops) in enumerate(paths)
            if len(hops) > 1
            for hop, kept in zip(hops, self.kept_s(hops, waiting), strict=True)
            for use in (
                (hop[0], route, kept / self.tokens / self.capacity(hop, spans_N2[hop[0]])),
                (peers + hop[0], route, float(slower_N[hop[0]]) * self.passes_s(hop) / self.tokens),
            )
        ]
        if not uses:
            return rates
        uses += [
            (peers + hops[0][0], route, float(self.costs.seconds_NL[hops[0][0]].sum()))
            for route, (_, hops) in enumerate(paths)
            if len(hops) == 1
        ]
        rows, columns, values = (np.array([use[axis] for use in uses]) for axis in range(3))
        scale = float(rates.sum())
        within = coo_matrix((values * scale, (rows, columns)), shape=(2 * peers, len(paths))).tocsr()
        if (within @ (rates / scale) <= 1).all():
            return rates
        bounds = np.column_stack((np.zeros(len(paths)), rates / scale))
        found = linprog(-np.ones(len(paths)), within, np.ones(2 * peers), bounds=bounds)
        return np.maximum(0.0, found.x) * scale if found.status == 0 else np.zeros(len(paths))


def with_steps(pipeline: Pipeline, paths: Sequence[Path], accumulate: int) -> Floats:
    """Return the tokens/s on each route with exact gradients, for which a step waits for all micro-batches in flight.

    An origin peer has as many micro-batches in flight as its longest route has hops, and a step needs `accumulate` of
    them to be back. So each step has M = accumulate + hops - 1 micro-batches. Each peer of the route pauses once for
    its own step: hop h waits kept_h seconds until its last micro-batch is back from the later hops, and then until the
    origin peer commits the micro-batch, while the gradient travels back over the earlier hops, for about half of
    kept_0 - kept_h. The other micro-batches follow each other as fast as without steps:

        tokens/s = M * tokens / (sum over hops h of (kept_0 + kept_h) / 2 + (M - 1) * tokens / tokens/s without steps)

    Hops pause for the micro-batches of all origin peers. So these are the tokens/s through the hop with the most, and
    each origin peer gets its share of them.

    The peers of a chain, which no other origin peer uses, step at the same time. So a step lasts for `accumulate`
    micro-batches, of which the first one finds no queue, and the others follow it (1F1B: PipeDream, arXiv 1806.03377):

        tokens/s = accumulate * tokens / (kept_0 without queues + (accumulate - 1) * tokens / tokens/s without steps)

    Args:
        pipeline: The costs of a micro-batch.
        paths: The routes, with what they carry without steps.
        accumulate: The smallest number of micro-batches in a step.
    """
    rates = np.array([rate for rate, _ in paths])
    users: dict[int, set[tuple[int, ...]]] = defaultdict(set)  # peer -> the peers of each route through it
    for rate, hops in paths:
        if rate > 0 and len(hops) > 1:
            peers = tuple(peer for peer, _, _ in hops)
            for peer in peers:
                users[peer].add(peers)
    origins = np.array([hops[0][0] for _, hops in paths], dtype=np.int64)  # there may be no paths
    routed = np.array([len(hops) > 1 for _, hops in paths], dtype=bool)
    through_N = np.zeros(pipeline.costs.peers)  # tokens/s that each peer computes for routes of several hops
    for rate, hops in (path for path in paths if len(path[1]) > 1):
        np.add.at(through_N, [peer for peer, _, _ in hops], rate)
    for origin in np.unique(origins[routed]):
        own = np.flatnonzero(routed & (origins == origin) & (rates > 0)).tolist()
        if not own:
            continue
        flow = float(rates[own].sum())
        many = accumulate + max(len(paths[route][1]) for route in own) - 1
        if all(len(users[peer]) == 1 for peer, _, _ in paths[own[0]][1]):
            many = accumulate
            pauses_s = sum(rates[route] * pipeline.kept_s(paths[route][1], 0.0)[0] for route in own) / flow
        else:
            pauses_s = sum(rates[route] * _pauses_s(pipeline.kept_s(paths[route][1])) for route in own) / flow
        most = max(float(through_N[peer]) for route in own for peer, _, _ in paths[route][1])
        cycle_s = max(pauses_s + (many - 1) * pipeline.tokens / most, many * pipeline.tokens / most)
        rates[own] *= many * pipeline.tokens / cycle_s / most
    return rates


def in_rounds(
    pipeline: Pipeline, paths: Sequence[Path], spans_N2: Sequence[tuple[int, int]], accumulate: int
) -> Floats:
    """Return the tokens/s on each route if origin peers train in rounds: exact gradients, as running peers evaluate.

    An origin peer that no other's route visits begins M micro-batches, waits until the last of them is back, and takes
    its step. F of them are in flight at a time: as many as memory allows that each peer j of its routes r has for them:

        M = max(accumulate, F);   F = min(accumulate + mean number of hops, 1 / max_j sum_r part_r / capacity_rj)
        tokens/s = M * tokens / (M / F * E[longest] + (F - 1) * tokens / flow),  at most the flow

    where part_r is the share of the origin peer's micro-batches that take route r, flow is what its routes carry
    together, and E[longest] is the expected longest time, without queues, of F random micro-batches. An origin peer on
    others' routes pauses for fewer steps (`ExecutionTable.step_waits`): BESIDE_STEPS * flow.

    Hops of several origin peers pause outside these rounds, so that their devices and with them the flow are slower
    (`_slower_by_pauses`). They also share their memory (`Pipeline.carried`).

    Args:
        pipeline: The costs of a micro-batch.
        paths: The routes of a flow.
        spans_N2: Each peer's layers.
        accumulate: The smallest number of micro-batches in a step.
    """
    rates = np.array([rate for rate, _ in paths])
    by_origin: dict[int, list[int]] = defaultdict(list)
    for route, (rate, hops) in enumerate(paths):
        if len(hops) > 1 and rate > 0:
            by_origin[hops[0][0]].append(route)
    visited = {peer for _, hops in paths for peer, _, _ in hops[1:]}
    slower_N = _slower_by_pauses(pipeline, paths, accumulate)
    if len(by_origin) > 1:
        use_N = _use(pipeline, paths, slower_N)
        most_used = [max(float(use_N[peer]) for peer, _, _ in hops) for _, hops in paths]
        rates = np.where([len(hops) > 1 for _, hops in paths], rates / np.maximum(1.0, most_used), rates)
    for origin, own in by_origin.items():
        if origin in visited:
            rates[own] *= BESIDE_STEPS
            continue
        flow = float(rates[own].sum())
        parts, routes = rates[own] / flow, [paths[route][1] for route in own]
        used_N = np.zeros(pipeline.costs.peers)  # share of each peer's memory that one micro-batch of the origin takes
        for part, hops in zip(parts.tolist(), routes, strict=True):
            for hop in hops:
                used_N[hop[0]] += part / pipeline.capacity(hop, spans_N2[hop[0]])
        mean_hops = sum(part * len(hops) for part, hops in zip(parts.tolist(), routes, strict=True))
        in_flight = min(accumulate + mean_hops, 1 / float(used_N.max()))
        many = max(float(accumulate), in_flight)
        longest_s = _longest_s([pipeline.kept_s(hops, 0.0)[0] for hops in routes], parts, in_flight)
        round_s = many / in_flight * longest_s + (in_flight - 1) * pipeline.tokens / flow
        rates[own] *= min(1.0, many * pipeline.tokens / round_s / flow)
    if len(by_origin) < 2:
        return rates
    limited = [(rate, hops) for rate, (_, hops) in zip(rates.tolist(), paths, strict=True)]
    waiting_N = WAITING_FOR_STEPS * np.minimum(1.0, _use(pipeline, limited, slower_N)) ** 2
    # No more micro-batches wait for a device than its memory has places for.
    for peer in {peer for _, hops in paths for peer, _, _ in hops}:
        places = pipeline.capacity((peer, *spans_N2[peer]), spans_N2[peer])
        waiting_N[peer] = min(waiting_N[peer], places - 1)
    return pipeline.carried(limited, spans_N2, waiting_N, slower_N)


def _slower_by_pauses(pipeline: Pipeline, paths: Sequence[Path], accumulate: int) -> Floats:
    """Return how many times as long, (N,), a micro-batch occupies each device as it computes there; 1 without pauses.

    A hop of several origin peers never sees all of their micro-batches decided, so it pauses for its steps. It begins a
    pause when it has gradients of G micro-batches, and ends it when those in flight behind it are committed, after
    P = (kept_0 + kept_h) / 2 seconds without queues (`with_steps`). A device that computes all the time but for pauses
    has P / passes_s in flight by Little's law, so with the constants of `ExecutionTable.step_waits`:

        G = max(min(MOST_AWAITED, PATIENT_TIMES * P / passes_s), PATIENT_STEPS * accumulate - 1)
        seconds of a micro-batch = passes_s + P / G
    """
    users: dict[int, set[int]] = defaultdict(set)  # peer -> the origin peers of the routes through it
    # For each peer: the tokens/s of its routes, and the sums of tokens/s times seconds of a pause, and of the passes.
    sums_N3 = np.zeros((pipeline.costs.peers, 3))
    for rate, hops in (path for path in paths if len(path[1]) > 1):
        kept_s = pipeline.kept_s(hops, 0.0)
        for (peer, first, last), one in zip(hops, kept_s, strict=True):
            users[peer].add(hops[0][0])
            sums_N3[peer] += rate, rate * (kept_s[0] + one) / 2, rate * pipeline.passes_s((peer, first, last))
    visited = {peer for _, hops in paths for peer, _, _ in hops[1:]}
    slower_N = np.ones(pipeline.costs.peers)
    for peer in visited:
        rate, pause_s, passes_s = sums_N3[peer] / max(1e-9, sums_N3[peer, 0])
        if len(users[peer]) > 1 and rate > 0:
            most = min(float(MOST_AWAITED), PATIENT_TIMES * pause_s / passes_s)
            slower_N[peer] += pause_s / max(most, PATIENT_STEPS * accumulate - 1) / passes_s
    return slower_N


def _use(pipeline: Pipeline, paths: Sequence[Path], slower_N: Floats) -> Floats:
    """Return the share of its time, (N,), in which each device computes or pauses; above 1 if that is too much."""
    use_N = np.zeros(pipeline.costs.peers)
    for rate, hops in paths:
        for hop in hops:
            use_N[hop[0]] += rate / pipeline.tokens * pipeline.passes_s(hop)
    return use_N * slower_N


def _longest_s(seconds: Sequence[float], parts: Floats, count: float) -> float:
    """Return the expected largest of `count` values that are drawn from `seconds` with probabilities `parts`."""
    order = np.argsort(seconds)
    below = np.minimum(1.0, np.cumsum(parts[order])) ** count
    return float(np.diff(below, prepend=0.0) @ np.array(seconds)[order])


def _pauses_s(kept_s: Sequence[float]) -> float:
    """Return the sum of the seconds for which the hops of a route pause for their steps."""
    return sum(kept_s[0] + one for one in kept_s) / 2


def accumulated(run: Config, sequences: int) -> int:
    """Return how many micro-batches of `sequences` sequences have as many sequences as a step of the run, at least 1.

    If `train.micro_batch` is "auto", the result is `train.accumulate`.
    """
    whole, train = run.train.micro_batch, run.train
    return max(1, train.accumulate * whole // sequences) if isinstance(whole, int) else train.accumulate


@dataclass(frozen=True, slots=True)
class Carried:
    """What the routes of a flow carry: the costs of the best micro-batches, and each route's tokens/s and hops."""

    pipeline: Pipeline
    paths: list[Path]  # only routes that carry tokens

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens/s of all routes."""
        return sum(rate for rate, _ in self.paths)

    @property
    def hops(self) -> float:
        """Return the mean number of hops of a token."""
        return sum(rate * len(hops) for rate, hops in self.paths) / max(1e-9, self.tokens_per_s)

    @property
    def routed(self) -> set[int]:
        """Return the peers on routes of several hops."""
        return {peer for _, hops in self.paths if len(hops) > 1 for peer, _, _ in hops}


@dataclass(frozen=True, slots=True, eq=False)
class Flights:
    """The facts that, with the costs of layers, decide how many micro-batches a planned swarm has in flight."""

    delay_NN: Floats  # delay of each link in one direction, in seconds
    run: Config

    def of_peers(self, peers_G: Ints) -> Self:
        """Return a copy for a part of the swarm: the peers with these numbers."""
        return replace(self, delay_NN=self.delay_NN[np.ix_(peers_G, peers_G)])

    def single(self, costs: LayerCosts) -> Pipeline:
        """Return the costs of micro-batches of one sequence."""
        return Pipeline(costs, self.delay_NN, self.run.model.context, 1)

    @property
    def micro_batches_waited_for(self) -> int | None:
        """Return how many one-sequence micro-batches a step with exact gradients awaits; None if steps do not wait."""
        return None if self.run.routes.overlap else accumulated(self.run, 1)

    def usual_link_s(self, costs: LayerCosts) -> Floats:
        """Return the seconds, (N,), in which a sequence goes over a link of each peer, and its gradient comes back.

        The result is the median over each peer's NEAREST fastest links; 0 for a peer without links.
        """
        pipeline = self.single(costs)
        fastest_NM = np.argsort(-costs.link_NN, axis=1, kind="stable")[:, :NEAREST]
        times_s = (
            [pipeline.link_s(peer, other) for other in row if costs.link_NN[peer, other] > 0]
            for peer, row in enumerate(fastest_NM.tolist())
        )
        return np.array([float(np.median(one)) if one else 0.0 for one in times_s])

    def carried(self, costs: LayerCosts, paths: Sequence[Path], spans_N2: Ints) -> Carried:
        """Return what routes carry with the best micro-batches.

        The largest micro-batches are chosen whose throughput is at most LOST_SHARE below that of the best size, since
        devices are slow with small micro-batches. A size that loses more than TRIED_SHARE ends the trials.

        Args:
            costs: What layers cost each peer.
            paths: The routes of a flow.
            spans_N2: Each peer's layers.
        """
        spans = [(int(first), int(last)) for first, last in spans_N2]
        routed = {hop[0] for _, hops in paths if len(hops) > 1 for hop in hops}
        most = min((costs.sequences(peer, spans[peer][0], spans[peer][1]) for peer in routed), default=1)
        found: list[tuple[Pipeline, Floats]] = []
        best = 0.0
        for sequences in SIZES:
            if sequences <= most and (not found or found[-1][1].sum() >= (1 - TRIED_SHARE) * best):
                pipeline = Pipeline(costs, self.delay_NN, self.run.model.context, sequences)
                found.append((pipeline, self._rates(pipeline, paths, spans)))
                best = max(best, float(found[-1][1].sum()))
        pipeline, rates = next(one for one in reversed(found) if one[1].sum() >= (1 - LOST_SHARE) * best)
        hops = [hops for _, hops in paths]
        return Carried(pipeline, [path for path in zip(rates.tolist(), hops, strict=True) if path[0] > 0])

    def _rates(self, pipeline: Pipeline, paths: Sequence[Path], spans: Sequence[tuple[int, int]]) -> Floats:
        """Return the tokens/s on each route with micro-batches of one size."""
        if self.run.routes.overlap:
            return pipeline.carried(paths, spans)
        with_waits = with_steps(pipeline, paths, accumulated(self.run, pipeline.sequences))
        slower = [(rate, hops) for rate, (_, hops) in zip(with_waits.tolist(), paths, strict=True)]
        return pipeline.carried(slower, spans)
