"""The compiled inner loop of the layout searches: propose a move, update the cost, accept or reject. Start at `anneal`.

A layout is `slots`: S stages of R peers one after the other, in pipeline order, then the unused peers. The moves are:
swap two peers of different stages, or a peer and an unused peer; swap segments of two pipelines; reverse a range of
stages. A swap of two peers changes the sums of two stages and at most four of the S - 1 stage boundaries. Only these
are recomputed, and the computation stops as soon as the move is known to be too expensive.

The true cost consists of maxima, so it has many plateaus. Therefore the searches use a smoothed cost: the true cost
plus `smooth` times the mean costs (means of `data_S` and `near_S`). The best layout is chosen by its true cost.

Stage boundary s is between stages s and s + 1.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decentral.core.compiled import compiled, inner
from decentral.scheduler.sync.layout_cost import Problem
from decentral.scheduler.sync.matching import matching_above
from decentral.scheduler.topology.arrays import Flags, Floats, Ints

RandomState = NDArray[np.uint64]  # one nonzero number; numba takes seconds to compile numpy's own generators
REVERSALS, PIECES = 0.03, 0.12  # shares of proposals that reverse stages or swap segments; the others swap two peers


class State(NamedTuple):
    """A layout, and the parts of its cost, which moves update in place. All costs are in seconds."""

    slots: Ints
    row_N: Floats  # for each peer: seconds to average gradients with its stage
    data_S: Floats  # for each stage: the largest `row_N` of its peers
    boundary_S: Floats  # seconds between stages s and s + 1, by bottleneck matching; the last entry is 0
    # A smoother `boundary_S`: its geometric mean with the mean seconds from a peer to the nearest peer across it.
    near_S: Floats


class Cooling(NamedTuple):
    """A part of an annealing schedule: the temperature falls from `hot` to `cold` seconds over `steps` proposals."""

    steps: int
    hot: float  # temperature in seconds; with 0, no move that raises the cost is accepted
    cold: float
    smooth: float


class Proposals(NamedTuple):
    """A source of random moves; it knows each peer's twin, since a swap of twins changes nothing."""

    twin_N: Ints
    random: RandomState


def move_s(problem: Problem) -> float:
    """Return the seconds that a proposed move takes on a quiet core; it matches stages at up to four boundaries."""
    boundaries = min(4, problem.stages - 1)
    return 1e-7 + 1e-8 * problem.stages + 3.5e-9 * boundaries * problem.replicas**2


def state_s(problem: Problem) -> float:
    """Return the seconds that the cost of a layout takes on a quiet core."""
    return 1e-5 + 2.2e-8 * problem.stages * problem.replicas**2


def proposals(problem: Problem, rng: np.random.Generator) -> Proposals:
    """Return a source of random moves, seeded from `rng`."""
    return Proposals(twins(problem), rng.integers(1, 1 << 63, 1, dtype=np.uint64))


@inner
def _unit(random: RandomState) -> float:
    """Return a uniform random number in [0, 1), by xorshift64* (Vigna 2016)."""
    word = random[0]
    word ^= word >> np.uint64(12)
    word ^= word << np.uint64(25)
    word ^= word >> np.uint64(27)
    random[0] = word
    return float((word * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@compiled
def initial_state(problem: Problem, slots: Ints) -> State:
    """Compute the search state of a layout; moves that are applied to the state also change `slots`."""
    stages = problem.stages
    row_N, data_S = np.zeros(slots.size), np.zeros(stages)
    for stage in range(stages):
        data_S[stage] = _sums(problem, slots, stage, row_N)
    boundary_S, near_S = np.zeros(stages), np.zeros(stages)
    for stage in range(stages - 1):
        boundary_S[stage], near_S[stage] = boundary(problem.pipe_NN, slots, problem.replicas, stage, stage + 1, np.inf)
    return State(slots, row_N, data_S, boundary_S, near_S)


@inner
def _sums(problem: Problem, slots: Ints, stage: int, row_N: Floats) -> float:
    """Write the data-parallel seconds of the stage's peers to `row_N`, and return the largest."""
    data_NN, replicas, largest = problem.data_NN, problem.replicas, 0.0
    for p in range(stage * replicas, (stage + 1) * replicas):
        seconds = 0.0
        for q in range(stage * replicas, (stage + 1) * replicas):
            seconds += data_NN[slots[p], slots[q]]
        row_N[slots[p]] = seconds
        largest = max(largest, seconds)
    return largest


@compiled
def twins(problem: Problem) -> Ints:
    """Return each peer's twin: the first peer with the same link costs. Swapping twins does not change the cost."""
    twin_N = np.arange(len(problem.data_NN))
    for peer in range(twin_N.size):
        for kind in range(peer):
            if twin_N[kind] == kind and _alike(problem, peer, kind):
                twin_N[peer] = kind
                break
    return twin_N


@inner
def _alike(problem: Problem, a: int, b: int) -> bool:
    data_NN, pipe_NN = problem.data_NN, problem.pipe_NN
    for other in range(len(data_NN)):
        differ = data_NN[a, other] != data_NN[b, other] or pipe_NN[a, other] != pipe_NN[b, other]
        if differ and other != a and other != b:
            return False
    return True


@compiled
def total(state: State) -> float:
    """Return the true cost in seconds: the most expensive stage, plus twice the cost of each boundary."""
    data_S, boundary_S, peak, path = state.data_S, state.boundary_S, 0.0, 0.0
    for stage in range(data_S.size):
        peak = max(peak, data_S[stage])
        path += boundary_S[stage]
    return peak + 2.0 * path


@inner
def boundary(pipe_NN: Floats, slots: Ints, replicas: int, first: int, second: int, limit: float) -> tuple[float, float]:
    """Return the seconds of two stages' bottleneck matching (inf if above `limit`), and their entry of `near_S`."""
    cost_RR = np.empty((replicas, replicas))
    nearest = np.empty(replicas)
    for j in range(replicas):
        nearest[j] = np.inf
    near, bound = 0.0, 0.0
    for i in range(replicas):
        peer = slots[first * replicas + i]
        least = np.inf
        for j in range(replicas):
            seconds = pipe_NN[peer, slots[second * replicas + j]]
            cost_RR[i, j] = seconds
            least = min(least, seconds)
            nearest[j] = min(nearest[j], seconds)
        near += least
        bound = max(bound, least)
    for j in range(replicas):
        near += nearest[j]
        bound = max(bound, nearest[j])
    near /= 2 * replicas
    value = matching_above(cost_RR, bound, limit, np.empty(replicas, np.int64))
    return value, np.sqrt(near * value) if value < np.inf else near


@compiled
def anneal(
    problem: Problem, state: State, best_slots: Ints, best: float, cooling: Cooling, proposals: Proposals
) -> float:
    """Anneal `state` in place by Metropolis's rule, and return the lowest true cost found, in seconds; at most `best`.

    If a layout costs less than `best`, the cheapest layout found is copied to `best_slots`.
    """
    slots, random, twin_N, smooth = state.slots, proposals.random, proposals.twin_N, cooling.smooth
    stages, replicas = problem.stages, problem.replicas
    used = stages * replicas
    temperature = cooling.hot
    decay = (cooling.cold / temperature) ** (1.0 / max(1, cooling.steps)) if temperature > 0 else 1.0
    here = total(state) + smooth * _means(state)
    for _ in range(cooling.steps):
        temperature *= decay
        limit = here - temperature * np.log(1.0 - _unit(random)) + 1e-12
        kind = _unit(random)
        if stages > 2 and kind < REVERSALS:
            after = _try_reversal(problem, state, here, limit, smooth, random)
        elif stages > 3 and kind < REVERSALS + PIECES:
            after = _try_pieces(problem, state, limit, smooth, random)
        else:
            p = int(_unit(random) * used)
            q = int(_unit(random) * slots.size)
            if p // replicas == min(q, used) // replicas or twin_N[slots[p]] == twin_N[slots[q]]:
                continue
            after = _try_swap(problem, state, p, q, limit, smooth)
        if after < np.inf:
            here = after
        if here < best + smooth * _means(state) - 1e-9:
            best = total(state)
            for slot in range(slots.size):
                best_slots[slot] = slots[slot]
    return best


@inner
def _try_swap(problem: Problem, state: State, p: int, q: int, limit: float, smooth: float) -> float:
    """Swap the peers in slots p and q if the smoothed cost stays within `limit`; return the new cost, else inf."""
    slots, _row_N, data_S, boundary_S, near_S = state
    stages, replicas = problem.stages, problem.replicas
    s, t = p // replicas, q // replicas  # for t >= stages, the peer in slot q is unused
    a, b = slots[p], slots[q]
    into_s, sum_b = _stage_after(problem, state, p, b)
    into_t, sum_a = 0.0, 0.0
    if t < stages:
        into_t, sum_a = _stage_after(problem, state, q, a)
    peak, mean = 0.0, 0.0
    for stage in range(stages):
        value = into_s if stage == s else (into_t if stage == t else data_S[stage])
        peak = max(peak, value)
        mean += value
    after = peak + smooth * mean / stages
    affected = np.empty(4, np.int64)
    count = 0
    for stage in range(stages - 1):
        if stage in (s - 1, s, t - 1, t):
            affected[count] = stage
            count += 1
        else:
            after += 2.0 * (boundary_S[stage] + smooth * near_S[stage])
    if after > limit:
        return np.inf
    slots[p], slots[q] = b, a
    fresh, close = np.zeros(4), np.zeros(4)
    for i in range(count):
        stage = affected[i]
        fresh[i], close[i] = boundary(problem.pipe_NN, slots, replicas, stage, stage + 1, (limit - after) / 2.0)
        after += 2.0 * (fresh[i] + smooth * close[i])
        if after > limit:
            slots[p], slots[q] = a, b
            return np.inf
    for i in range(count):
        boundary_S[affected[i]], near_S[affected[i]] = fresh[i], close[i]
    _replace_in_sums(problem, state, p, a, sum_b)
    data_S[s] = into_s
    if t < stages:
        _replace_in_sums(problem, state, q, b, sum_a)
        data_S[t] = into_t
    else:
        state.row_N[a] = 0.0
    return after


@inner
def _stage_after(problem: Problem, state: State, slot: int, newcomer: int) -> tuple[float, float]:
    """Return the largest data-parallel seconds in a stage, and those of `newcomer`, if `newcomer` took `slot`."""
    data_NN, slots, row_N = problem.data_NN, state.slots, state.row_N
    leaver, start = slots[slot], slot // problem.replicas * problem.replicas
    peak, own = 0.0, 0.0
    for other in range(start, start + problem.replicas):
        if other != slot:
            peer = slots[other]
            seconds = data_NN[newcomer, peer]
            own += seconds
            peak = max(peak, row_N[peer] - data_NN[leaver, peer] + seconds)
    return max(peak, own), own


@inner
def _replace_in_sums(problem: Problem, state: State, slot: int, leaver: int, own: float) -> None:
    """Update `row_N` after a peer replaced `leaver` in `slot`; `own` is the new peer's data-parallel seconds."""
    data_NN, slots, row_N = problem.data_NN, state.slots, state.row_N
    newcomer, start = slots[slot], slot // problem.replicas * problem.replicas
    for other in range(start, start + problem.replicas):
        if other != slot:
            peer = slots[other]
            row_N[peer] += data_NN[newcomer, peer] - data_NN[leaver, peer]
    row_N[newcomer] = own


@inner
def _try_pieces(problem: Problem, state: State, limit: float, smooth: float, random: RandomState) -> float:
    """Swap segments of two pipelines if the smoothed cost stays within `limit`; return the new cost, else inf.

    The segments are in different stages. Each segment is a path from a peer to the nearest peer in the next stage.
    Swapping the peers one by one would lead through layouts that cost more.
    """
    slots, stages, replicas = state.slots, problem.stages, problem.replicas
    length = 2 + int(_unit(random) * (stages // 2 - 1))
    s, t = int(_unit(random) * (stages - length + 1)), int(_unit(random) * (stages - length + 1))
    if abs(s - t) < length:
        return np.inf
    one, two = np.empty(length, np.int64), np.empty(length, np.int64)
    touched_S = np.zeros(stages, np.bool_)
    one[0], two[0] = (s + _unit(random)) * replicas, (t + _unit(random)) * replicas
    for i in range(length):
        if i > 0:
            one[i] = _nearest(problem, slots, one[i - 1], s + i, int(_unit(random) * replicas))
            two[i] = _nearest(problem, slots, two[i - 1], t + i, int(_unit(random) * replicas))
        touched_S[s + i] = touched_S[t + i] = True
    for i in range(length):
        slots[one[i]], slots[two[i]] = slots[two[i]], slots[one[i]]
    after = _accepted(problem, state, touched_S, limit, smooth)
    if after == np.inf:
        for i in range(length):
            slots[one[i]], slots[two[i]] = slots[two[i]], slots[one[i]]
    return after


@inner
def _nearest(problem: Problem, slots: Ints, slot: int, stage: int, turn: int) -> int:
    """Return the slot in `stage` whose peer is nearest to the peer in `slot`; the search starts at position `turn`."""
    pipe_NN, replicas = problem.pipe_NN, problem.replicas
    best, found = np.inf, 0
    for i in range(replicas):
        other = stage * replicas + (i + turn) % replicas
        if pipe_NN[slots[slot], slots[other]] < best:
            best, found = pipe_NN[slots[slot], slots[other]], other
    return found


@inner
def _accepted(problem: Problem, state: State, touched_S: Flags, limit: float, smooth: float) -> float:
    """Recompute the costs in `state` after changes in the stages `touched_S`, and return the smoothed cost.

    If the smoothed cost exceeds `limit`, return inf and leave the costs in `state` unchanged.
    """
    slots, row_N, data_S, boundary_S, near_S = state
    stages = problem.stages
    row, data, fresh, close = row_N.copy(), data_S.copy(), boundary_S.copy(), near_S.copy()
    peak, after = 0.0, 0.0
    for stage in range(stages):
        if touched_S[stage]:
            data[stage] = _sums(problem, slots, stage, row)
        peak = max(peak, data[stage])
        after += smooth * data[stage] / stages
    after += peak
    for stage in range(stages - 1):
        if not (touched_S[stage] or touched_S[stage + 1]):
            after += 2.0 * (boundary_S[stage] + smooth * near_S[stage])
    for stage in range(stages - 1):
        if touched_S[stage] or touched_S[stage + 1]:
            if after > limit:
                return np.inf
            fresh[stage], close[stage] = boundary(
                problem.pipe_NN, slots, problem.replicas, stage, stage + 1, (limit - after) / 2.0
            )
            after += 2.0 * (fresh[stage] + smooth * close[stage])
    if after > limit:
        return np.inf
    row_N[:], data_S[:], boundary_S[:], near_S[:] = row, data, fresh, close
    return after


@inner
def _try_reversal(
    problem: Problem, state: State, here: float, limit: float, smooth: float, random: RandomState
) -> float:
    """Reverse a random range of stages if the smoothed cost stays within `limit`; return the new cost, else inf."""
    slots, _, data_S, boundary_S, near_S = state
    stages, replicas, pipe_NN = problem.stages, problem.replicas, problem.pipe_NN
    first = int(_unit(random) * stages)
    last = int(_unit(random) * stages)
    first, last = min(first, last), max(first, last)
    if first == last or (first == 0 and last == stages - 1):
        return np.inf
    after = here
    left, near_left, right, near_right = 0.0, 0.0, 0.0, 0.0
    if first > 0:
        left, near_left = boundary(pipe_NN, slots, replicas, first - 1, last, np.inf)
        after += 2.0 * (left - boundary_S[first - 1] + smooth * (near_left - near_S[first - 1]))
    if last < stages - 1:
        right, near_right = boundary(pipe_NN, slots, replicas, first, last + 1, np.inf)
        after += 2.0 * (right - boundary_S[last] + smooth * (near_right - near_S[last]))
    if after > limit:
        return np.inf
    for i in range((last - first + 1) // 2):
        one, two = first + i, last - i
        for r in range(replicas):
            p, q = one * replicas + r, two * replicas + r
            slots[p], slots[q] = slots[q], slots[p]
        data_S[one], data_S[two] = data_S[two], data_S[one]
    for i in range((last - first) // 2):
        one, two = first + i, last - 1 - i
        boundary_S[one], boundary_S[two] = boundary_S[two], boundary_S[one]
        near_S[one], near_S[two] = near_S[two], near_S[one]
    if first > 0:
        boundary_S[first - 1], near_S[first - 1] = left, near_left
    if last < stages - 1:
        boundary_S[last], near_S[last] = right, near_right
    return after


@inner
def _means(state: State) -> float:
    """Return the mean costs, in seconds, that the smoothed cost adds with weight `smooth`."""
    data_S, near_S, means = state.data_S, state.near_S, 0.0
    for stage in range(data_S.size):
        means += data_S[stage] / data_S.size + 2.0 * near_S[stage]
    return means
