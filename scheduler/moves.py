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

from decentral.scheduler.arrays import Floats, Ints, compiled
from decentral.scheduler.matching import bottleneck_matching

State = tuple[Ints, Floats, Floats, Floats, Floats]  # slots, row_N, dearest_S, joint_S, near_S


@compiled
def start(data_NN: Floats, pipe_NN: Floats, stages: int, replicas: int, slots: Ints) -> State:
    """The state of this layout, computed in full."""
    row_N = np.zeros(slots.size)
    dearest_S = np.zeros(stages)
    for stage in range(stages):
        members = slots[stage * replicas : (stage + 1) * replicas]
        for peer in members:
            for other in members:
                row_N[peer] += data_NN[peer, other]
            dearest_S[stage] = max(dearest_S[stage], row_N[peer])
    joint_S, near_S = np.zeros(stages), np.zeros(stages)
    for stage in range(stages - 1):
        joint_S[stage], near_S[stage] = joint(pipe_NN, slots, replicas, stage, stage + 1, np.inf)
    return slots, row_N, dearest_S, joint_S, near_S


@compiled
def twins(data_NN: Floats, pipe_NN: Floats) -> Ints:
    """A number for each peer, equal for peers that the links cannot tell apart: swapping them changes nothing."""
    count = len(data_NN)
    twin_N = np.arange(count)
    kinds = np.empty(count, np.int64)
    known = 0
    for peer in range(count):
        for kind in kinds[:known]:
            same = True
            for other in range(count):
                if other not in (peer, kind) and (
                    data_NN[peer, other] != data_NN[kind, other] or pipe_NN[peer, other] != pipe_NN[kind, other]
                ):
                    same = False
                    break
            if same:
                twin_N[peer] = kind
                break
        if twin_N[peer] == peer:
            kinds[known] = peer
            known += 1
    return twin_N


@compiled
def total(dearest_S: Floats, joint_S: Floats) -> float:
    """Seconds: the dearest stage, and each joint forward and back."""
    return float(dearest_S.max() + 2.0 * joint_S.sum())


@compiled
def joint(pipe_NN: Floats, slots: Ints, replicas: int, first: int, second: int, limit: float) -> tuple[float, float]:
    """The bottleneck matching of two stages (inf once it is known to exceed `limit`), and the mean nearest."""
    cost_RR = np.empty((replicas, replicas))
    nearest = np.full(replicas, np.inf)
    near = 0.0
    for i in range(replicas):
        row = pipe_NN[slots[first * replicas + i]]
        least = np.inf
        for j in range(replicas):
            seconds = row[slots[second * replicas + j]]
            cost_RR[i, j] = seconds
            least = min(least, seconds)
            nearest[j] = min(nearest[j], seconds)
        near += least
    near = (near + nearest.sum()) / (2 * replicas)
    if near > limit:
        return np.inf, near
    value = bottleneck_matching(cost_RR, limit, np.empty(replicas, np.int64))
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
    rng: np.random.Generator,
) -> float:
    """`steps` proposals at temperatures falling from `hot` to `cold` seconds (Metropolis); 0 is pure descent.

    Updates `state`; `best_slots` gets the layout of
    least true cost where it is below `best`. Returns that cost.
    """
    slots, _row_N, dearest_S, joint_S, near_S = state
    stages = dearest_S.size
    used = stages * replicas
    cooling = (cold / hot) ** (1.0 / max(1, steps)) if hot > 0 else 1.0
    temperature = hot
    here = total(dearest_S, joint_S) + smooth * _softness(dearest_S, near_S)
    for _ in range(steps):
        temperature *= cooling
        limit = here - temperature * np.log(1.0 - rng.random()) + 1e-12
        if stages > 2 and rng.random() < 0.03:
            here = _try_reversal(pipe_NN, replicas, state, here, limit, smooth, rng)
        else:
            p = int(rng.random() * used)
            q = int(rng.random() * slots.size)
            if p // replicas == min(q, used) // replicas or twin_N[slots[p]] == twin_N[slots[q]]:
                continue
            here = _try_swap(data_NN, pipe_NN, replicas, state, p, q, here, limit, smooth)
        if here < best + smooth * _softness(dearest_S, near_S) - 1e-9:
            best = total(dearest_S, joint_S)
            best_slots[:] = slots
    return best


@compiled
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


@compiled
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


@compiled
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


@compiled
def _try_reversal(
    pipe_NN: Floats, replicas: int, state: State, here: float, limit: float, smooth: float, rng: np.random.Generator
) -> float:
    """Reverses a random run of stages if the cost stays within `limit`. Returns the cost after it."""
    slots, _, dearest_S, joint_S, near_S = state
    stages = dearest_S.size
    first = int(rng.random() * stages)
    last = int(rng.random() * stages)
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
    run = slots[first * replicas : (last + 1) * replicas].copy().reshape(last - first + 1, replicas)
    slots[first * replicas : (last + 1) * replicas] = run[::-1].copy().ravel()
    dearest_S[first : last + 1] = dearest_S[first : last + 1][::-1].copy()
    for kept in (joint_S, near_S):
        kept[first:last] = kept[first:last][::-1].copy()
    if first > 0:
        joint_S[first - 1], near_S[first - 1] = left, near_left
    if last < stages - 1:
        joint_S[last], near_S[last] = right, near_right
    return after


@compiled
def _softness(dearest_S: Floats, near_S: Floats) -> float:
    """What `smooth` multiplies in the softened cost."""
    return float(dearest_S.mean() + 2.0 * near_S.sum())
