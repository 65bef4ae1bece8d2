"""The searches' inner loop, compiled: propose a move, work out the new cost from what changed, accept or not.

A layout is `slots`: S stages of R peers one after the other, in pipeline order, then the peers that are not used.
Moves: swap two peers of different stages (or with an unused one), and reverse a run of stages. A swap changes the
sums of two stages and at most four of the S - 1 joints between neighbours, so only these are computed, cheapest
first, and no further than needed to know that the move is too dear.

What is kept beside `slots`: `row_N` (each peer's sum over its stage), `dearest_S` (each stage's largest),
`joint_S` (joint_S[s] is the bottleneck matching of stages s and s + 1; the last is 0), and `near_S` (the same
joint's mean distance from a peer to the nearest one on the other side).

The true cost is full of plateaus, because it is made of maxima. So the searches walk on a softened one, in which
`smooth` times the means (of `dearest_S`, and of `near_S`) counts beside the maxima; the best layout is kept by its
true cost.
"""

import numpy as np
from numpy.typing import NDArray

from decentral.scheduler.shared.arrays import Flags, Floats, Ints
from decentral.scheduler.shared.machine_code import compiled, inner
from decentral.scheduler.sync.matching import matching_above

State = tuple[Ints, Floats, Floats, Floats, Floats]  # slots, row_N, dearest_S, joint_S, near_S
Dice = NDArray[np.uint64]  # one word, not 0; numba takes seconds to compile numpy's generators
REVERSALS, RUNS = 0.03, 0.12  # of the proposals


def dice(rng: np.random.Generator) -> Dice:
    """A random state for `anneal`, drawn from `rng`."""
    return rng.integers(1, 1 << 63, 1, dtype=np.uint64)


@inner
def _unit(dice: Dice) -> float:
    """Uniform in [0, 1): xorshift64* (Vigna 2016)."""
    word = dice[0]
    word ^= word >> np.uint64(12)
    word ^= word << np.uint64(25)
    word ^= word >> np.uint64(27)
    dice[0] = word
    return float((word * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@compiled
def start(data_NN: Floats, pipe_NN: Floats, stages: int, replicas: int, slots: Ints) -> State:
    """The state of this layout, computed in full."""
    row_N = np.zeros(slots.size)
    dearest_S = np.zeros(stages)
    for stage in range(stages):
        dearest_S[stage] = _sums(data_NN, slots, replicas, stage, row_N)
    joint_S, near_S = np.zeros(stages), np.zeros(stages)
    for stage in range(stages - 1):
        joint_S[stage], near_S[stage] = joint(pipe_NN, slots, replicas, stage, stage + 1, np.inf)
    return slots, row_N, dearest_S, joint_S, near_S


@inner
def _sums(data_NN: Floats, slots: Ints, replicas: int, stage: int, row_N: Floats) -> float:
    """Writes the sums of the stage's peers to `row_N`. Returns the largest."""
    dearest = 0.0
    for p in range(stage * replicas, (stage + 1) * replicas):
        seconds = 0.0
        for q in range(stage * replicas, (stage + 1) * replicas):
            seconds += data_NN[slots[p], slots[q]]
        row_N[slots[p]] = seconds
        dearest = max(dearest, seconds)
    return dearest


@compiled
def twins(data_NN: Floats, pipe_NN: Floats) -> Ints:
    """A number for each peer, equal for peers that the links cannot tell apart: swapping them changes nothing."""
    count = len(data_NN)
    twin_N = np.arange(count)
    for peer in range(count):
        for kind in range(peer):
            if twin_N[kind] == kind and _alike(data_NN, pipe_NN, peer, kind):
                twin_N[peer] = kind
                break
    return twin_N


@inner
def _alike(data_NN: Floats, pipe_NN: Floats, a: int, b: int) -> bool:
    for other in range(len(data_NN)):
        differ = data_NN[a, other] != data_NN[b, other] or pipe_NN[a, other] != pipe_NN[b, other]
        if differ and other != a and other != b:
            return False
    return True


@compiled
def total(dearest_S: Floats, joint_S: Floats) -> float:
    """Seconds: the dearest stage, and each joint forward and back."""
    peak, path = 0.0, 0.0
    for stage in range(dearest_S.size):
        peak = max(peak, dearest_S[stage])
        path += joint_S[stage]
    return peak + 2.0 * path


@inner
def joint(pipe_NN: Floats, slots: Ints, replicas: int, first: int, second: int, limit: float) -> tuple[float, float]:
    """The bottleneck matching of two stages (inf once it is known to exceed `limit`), and the mean nearest."""
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
    data_NN: Floats,
    pipe_NN: Floats,
    replicas: int,
    state: State,
    best_slots: Ints,
    best: float,
    steps: int,
    hot: float,
    cold: float,
    smooth: float,
    twin_N: Ints,
    dice: Dice,
) -> float:
    """`steps` proposals at temperatures falling from `hot` to `cold` seconds (Metropolis); 0 is pure descent.

    Updates `state`; `best_slots` gets the layout of least true cost where it is below `best`. Returns that cost.
    """
    slots, _row_N, dearest_S, joint_S, near_S = state
    stages = dearest_S.size
    used = stages * replicas
    cooling = (cold / hot) ** (1.0 / max(1, steps)) if hot > 0 else 1.0
    temperature = hot
    here = total(dearest_S, joint_S) + smooth * _softness(dearest_S, near_S)
    for _ in range(steps):
        temperature *= cooling
        limit = here - temperature * np.log(1.0 - _unit(dice)) + 1e-12
        kind = _unit(dice)
        if stages > 2 and kind < REVERSALS:
            here = _try_reversal(pipe_NN, replicas, state, here, limit, smooth, dice)
        elif stages > 3 and kind < REVERSALS + RUNS:
            here = _try_run(data_NN, pipe_NN, replicas, state, here, limit, smooth, dice)
        else:
            p = int(_unit(dice) * used)
            q = int(_unit(dice) * slots.size)
            if p // replicas == min(q, used) // replicas or twin_N[slots[p]] == twin_N[slots[q]]:
                continue
            here = _try_swap(data_NN, pipe_NN, replicas, state, p, q, here, limit, smooth)
        if here < best + smooth * _softness(dearest_S, near_S) - 1e-9:
            best = total(dearest_S, joint_S)
            for slot in range(slots.size):
                best_slots[slot] = slots[slot]
    return best


@inner
def _try_swap(
    data_NN: Floats,
    pipe_NN: Floats,
    replicas: int,
    state: State,
    p: int,
    q: int,
    here: float,
    limit: float,
    smooth: float,
) -> float:
    """Swaps the peers in slots p and q if the cost stays within `limit`. Returns the cost after it."""
    slots, row_N, dearest_S, joint_S, near_S = state
    stages = dearest_S.size
    s, t = p // replicas, q // replicas  # t >= stages: q is not used
    a, b = slots[p], slots[q]
    into_s, sum_b = _stage_after(data_NN, slots, row_N, replicas, s, p, b)
    into_t, sum_a = 0.0, 0.0
    if t < stages:
        into_t, sum_a = _stage_after(data_NN, slots, row_N, replicas, t, q, a)
    peak, mean = 0.0, 0.0
    for stage in range(stages):
        value = into_s if stage == s else (into_t if stage == t else dearest_S[stage])
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
            after += 2.0 * (joint_S[stage] + smooth * near_S[stage])
    if after > limit:
        return here
    slots[p], slots[q] = b, a
    fresh, close = np.zeros(4), np.zeros(4)
    for i in range(count):
        stage = affected[i]
        fresh[i], close[i] = joint(pipe_NN, slots, replicas, stage, stage + 1, (limit - after) / 2.0)
        after += 2.0 * (fresh[i] + smooth * close[i])
        if after > limit:
            slots[p], slots[q] = a, b
            return here
    for i in range(count):
        joint_S[affected[i]], near_S[affected[i]] = fresh[i], close[i]
    _settle(data_NN, slots, row_N, replicas, s, p, a, b, sum_b)
    dearest_S[s] = into_s
    if t < stages:
        _settle(data_NN, slots, row_N, replicas, t, q, b, a, sum_a)
        dearest_S[t] = into_t
    else:
        row_N[a] = 0.0
    return after


@inner
def _stage_after(
    data_NN: Floats, slots: Ints, row_N: Floats, replicas: int, stage: int, slot: int, newcomer: int
) -> tuple[float, float]:
    """The dearest sum of the stage once `newcomer` has taken `slot`, and the newcomer's own."""
    leaver = slots[slot]
    peak, own = 0.0, 0.0
    for other in range(stage * replicas, (stage + 1) * replicas):
        if other != slot:
            peer = slots[other]
            seconds = data_NN[newcomer, peer]
            own += seconds
            peak = max(peak, row_N[peer] - data_NN[leaver, peer] + seconds)
    return max(peak, own), own


@inner
def _settle(
    data_NN: Floats,
    slots: Ints,
    row_N: Floats,
    replicas: int,
    stage: int,
    slot: int,
    leaver: int,
    newcomer: int,
    own: float,
) -> None:
    """Writes the sums of a stage in which `newcomer` has taken the slot of `leaver`."""
    for other in range(stage * replicas, (stage + 1) * replicas):
        if other != slot:
            peer = slots[other]
            row_N[peer] += data_NN[newcomer, peer] - data_NN[leaver, peer]
    row_N[newcomer] = own


@inner
def _try_run(
    data_NN: Floats, pipe_NN: Floats, replicas: int, state: State, here: float, limit: float, smooth: float, dice: Dice
) -> float:
    """Swaps a piece of a pipeline, over a few stages, with a piece of another over as many later or earlier ones.

    A pipeline's pieces stay in a region: peer by peer, each swap on the way would cost two slow joints.
    """
    slots, stages = state[0], state[2].size
    length = 2 + int(_unit(dice) * (stages // 2 - 1))
    s, t = int(_unit(dice) * (stages - length + 1)), int(_unit(dice) * (stages - length + 1))
    if abs(s - t) < length:
        return here
    one, two = np.empty(length, np.int64), np.empty(length, np.int64)
    touched_S = np.zeros(stages, np.bool_)
    one[0], two[0] = (s + _unit(dice)) * replicas, (t + _unit(dice)) * replicas
    for i in range(length):
        if i > 0:
            one[i] = _next(pipe_NN, slots, replicas, one[i - 1], s + i, int(_unit(dice) * replicas))
            two[i] = _next(pipe_NN, slots, replicas, two[i - 1], t + i, int(_unit(dice) * replicas))
        touched_S[s + i] = touched_S[t + i] = True
    for i in range(length):
        slots[one[i]], slots[two[i]] = slots[two[i]], slots[one[i]]
    after = _accepted(data_NN, pipe_NN, replicas, state, touched_S, limit, smooth)
    if after < np.inf:
        return after
    for i in range(length):
        slots[one[i]], slots[two[i]] = slots[two[i]], slots[one[i]]
    return here


@inner
def _next(pipe_NN: Floats, slots: Ints, replicas: int, slot: int, stage: int, turn: int) -> int:
    """The slot of the stage whose peer is nearest to that of `slot`; among equals the first after `turn`."""
    best, found = np.inf, 0
    for i in range(replicas):
        other = stage * replicas + (i + turn) % replicas
        if pipe_NN[slots[slot], slots[other]] < best:
            best, found = pipe_NN[slots[slot], slots[other]], other
    return found


@inner
def _accepted(
    data_NN: Floats,
    pipe_NN: Floats,
    replicas: int,
    state: State,
    touched_S: Flags,
    limit: float,
    smooth: float,
) -> float:
    """The cost now that the slots of the touched stages have changed; inf, and only slots changed, above `limit`."""
    slots, row_N, dearest_S, joint_S, near_S = state
    stages = dearest_S.size
    row, dearest, fresh, close = row_N.copy(), dearest_S.copy(), joint_S.copy(), near_S.copy()
    peak, after = 0.0, 0.0
    for stage in range(stages):
        if touched_S[stage]:
            dearest[stage] = _sums(data_NN, slots, replicas, stage, row)
        peak = max(peak, dearest[stage])
        after += smooth * dearest[stage] / stages
    after += peak
    for stage in range(stages - 1):
        if not (touched_S[stage] or touched_S[stage + 1]):
            after += 2.0 * (joint_S[stage] + smooth * near_S[stage])
    for stage in range(stages - 1):
        if touched_S[stage] or touched_S[stage + 1]:
            if after > limit:
                return np.inf
            fresh[stage], close[stage] = joint(pipe_NN, slots, replicas, stage, stage + 1, (limit - after) / 2.0)
            after += 2.0 * (fresh[stage] + smooth * close[stage])
    if after > limit:
        return np.inf
    for i in range(row.size):
        row_N[i] = row[i]
    for stage in range(stages):
        dearest_S[stage], joint_S[stage], near_S[stage] = dearest[stage], fresh[stage], close[stage]
    return after


@inner
def _try_reversal(
    pipe_NN: Floats, replicas: int, state: State, here: float, limit: float, smooth: float, dice: Dice
) -> float:
    """Reverses a random run of stages if the cost stays within `limit`. Returns the cost after it."""
    slots, _, dearest_S, joint_S, near_S = state
    stages = dearest_S.size
    first = int(_unit(dice) * stages)
    last = int(_unit(dice) * stages)
    first, last = min(first, last), max(first, last)
    if first == last or (first == 0 and last == stages - 1):
        return here
    after = here
    left, near_left, right, near_right = 0.0, 0.0, 0.0, 0.0
    if first > 0:
        left, near_left = joint(pipe_NN, slots, replicas, first - 1, last, np.inf)
        after += 2.0 * (left - joint_S[first - 1] + smooth * (near_left - near_S[first - 1]))
    if last < stages - 1:
        right, near_right = joint(pipe_NN, slots, replicas, first, last + 1, np.inf)
        after += 2.0 * (right - joint_S[last] + smooth * (near_right - near_S[last]))
    if after > limit:
        return here
    for i in range((last - first + 1) // 2):
        one, two = first + i, last - i
        for r in range(replicas):
            p, q = one * replicas + r, two * replicas + r
            slots[p], slots[q] = slots[q], slots[p]
        dearest_S[one], dearest_S[two] = dearest_S[two], dearest_S[one]
    for i in range((last - first) // 2):
        one, two = first + i, last - 1 - i
        joint_S[one], joint_S[two] = joint_S[two], joint_S[one]
        near_S[one], near_S[two] = near_S[two], near_S[one]
    if first > 0:
        joint_S[first - 1], near_S[first - 1] = left, near_left
    if last < stages - 1:
        joint_S[last], near_S[last] = right, near_right
    return after


@inner
def _softness(dearest_S: Floats, near_S: Floats) -> float:
    """What `smooth` multiplies in the softened cost."""
    softness = 0.0
    for stage in range(dearest_S.size):
        softness += dearest_S[stage] / dearest_S.size + 2.0 * near_S[stage]
    return softness
