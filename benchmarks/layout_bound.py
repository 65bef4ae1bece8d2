"""Whether any layout of a swarm of few kinds costs less than so many seconds: a better layout, or the proof of none.

The planner's benchmark uses it (`python -m benchmarks.planner --part bound`); no solver does, because it takes minutes.

Peers that the links cannot tell apart (those of one city, say) are one kind, and a stage is described by how many of
each kind it has: 64 peers of ten kinds have about 23,000 stages of eight. A layout is a path of S stages that together
use up each kind. It costs as much as its most expensive stage, and twice its S - 1 boundaries. Every boundary costs at
least the fastest link (`floor`); what it costs above that is its `extra`. A layout below `cut` can spend a budget on
extras, which is half of what `cut` leaves over its most expensive stage and twice S - 1 floors. All such layouts are
enumerated, except for those that three arguments rule out:

1. Split the path at the boundary of largest extra. No other boundary exceeds that extra, nor what is left of the
   budget. So budget / 2 limits all other boundaries from the start.
2. Take the components of kinds that links of extra at most x connect. A boundary of extra at most x matches no peers
   of different components: the stages on its two sides have as many peers in each. So if no boundary to come may
   exceed x, the p stages still to be placed before the left end have the same numbers as that end, the q stages after
   the right end those of that end, and the peers that are left must be p times the one and q times the other,
   component by component. Fewer than K values of x matter: those at which components merge.
3. If at most one boundary to come may exceed x, then the stages beyond it, p - i of them, have the same numbers in each
   component, so what is left after placing the other i and q must be p - i times those of a stage that is cheap enough.

Nothing is rounded in an unsafe direction: sums are counted in whole peers, components are compared by linear hashes
(equal numbers always have equal hashes), and costs with a tolerance of 1e-9 s.

Shapes: N peers, S stages, R replicas, K kinds, V different stages (in order of their data-parallel cost), L levels of
components (on the last level all kinds are one component), G groups of stages with the same numbers in each component.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decentral.core.compiled import compiled, inner
from decentral.core.errors import UserError
from decentral.scheduler.sync import local_search
from decentral.scheduler.sync.layout_cost import Problem, best_layout
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
MOST_STAGES = 60_000  # different stages; the time grows with their square, and faster with the budget of extras
REMEMBERED = 6_000  # the cheapest stages, between which the costs of boundaries are remembered
CLOSE = 1e-9  # seconds


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The cheapest layout below the cut that was found, as slots, or None; `proven`: there is no cheaper one."""

    slots: Ints | None
    cost: float
    proven: bool


def below(problem: Problem, cut: float, budget: SearchBudget) -> Verdict:
    """Searches all layouts that cost less than `cut` seconds, within the budget.

    It looks at the clock once for every stage, which can take seconds. Raises UserError for swarms of too many kinds of
    peers, and for those with unused peers.
    """
    if problem.stages * problem.replicas != problem.peers:
        raise UserError("a bound needs stages * replicas = peers: with peers to spare there is none yet")
    if problem.stages == 1:
        only = best_layout(problem, np.arange(problem.peers)).cost.total
        return Verdict(np.arange(problem.peers), only, True) if only < cut - CLOSE else Verdict(None, cut, True)
    most = problem.replicas * problem.data_NN.max() + 2 * problem.stages * problem.pipe_NN.max()
    cut = min(cut, float(most) + 1.0)
    twin_N = local_search.twins(problem)
    tables = _tables(problem, twin_N, cut)
    count_K = np.bincount(np.unique(twin_N, return_inverse=True)[1])
    path = np.zeros(problem.stages, np.int64)
    walk = _Enumeration(count_K, count_K.copy(), path, path.copy(), np.array([cut]))
    progress = SearchProgress(budget, cut)
    while progress.rounds < len(tables.data_V) and progress.goes_on():
        _split_at(tables, walk, progress.rounds)
        progress.report(float(walk.best[0]))
    return Verdict(_slots(tables, walk, twin_N, cut), float(walk.best[0]), progress.rounds == len(tables.data_V))


class _Tables(NamedTuple):
    """What is computed once, before the enumeration: one record, because compiled functions take it whole."""

    pipe_KK: Floats
    stage_VK: Ints  # how many peers of each kind a stage has
    kind_VR: Ints  # the kinds of its peers, flat
    data_V: Floats  # its data-parallel seconds
    label_LK: Ints  # each kind's component
    rise_L: Floats  # a boundary of less extra matches no peers of different components of this level
    weight_K: Words  # the hash's factor for each kind
    order_LV: Ints  # stages, group by group
    key_LG: Words  # the hash of each group, ascending
    first_LG: Ints  # where the group begins in order_LV
    least_LG: Floats  # the data-parallel seconds of its cheapest stage
    groups_L: Ints  # how many groups there are
    next_V: Ints  # where a stage's neighbours begin in `neighbour`
    neighbour: Ints  # stages whose boundary leaves enough budget for the last finite rise
    extra_of: Floats  # the extra of each of these boundaries
    value: Floats  # all costs of links, ascending
    memo_VV: Bytes  # 1 + the place in `value` of a boundary's cost; 0: not known yet
    floor: float
    boundaries: int
    replicas: int


class _Enumeration(NamedTuple):
    """What the enumeration writes to."""

    count_K: Ints  # all peers of each kind
    left_K: Ints  # those that are not placed yet
    path_S: Ints  # the stages placed so far
    found_S: Ints  # the cheapest path
    best: Floats  # one number: its cost in seconds, or the cut


class _Node(NamedTuple):
    """A piece of a path: its two end stages, how many stages are still to come on either side, and its cost."""

    left: int
    right: int
    before: int
    after: int
    data: float  # data-parallel seconds of its most expensive stage
    spent: float  # extras so far
    most: float  # the largest extra: that of the boundary at which the path was split


# Tables


def _tables(problem: Problem, twin_N: Ints, cut: float) -> _Tables:
    pipe_KK, data_KK, count_K = _by_kind(problem, twin_N)
    floor, boundaries = float(pipe_KK.min()), problem.stages - 1
    stage_VK = _all_stages(count_K, problem.replicas)
    data_V = np.where(stage_VK > 0, stage_VK @ data_KK - np.diag(data_KK), 0.0).max(axis=1)
    order = np.argsort(data_V, kind="stable")
    order = order[data_V[order] + 2 * boundaries * floor < cut]
    stage_VK, data_V = np.ascontiguousarray(stage_VK[order]), data_V[order]
    kind_VR = np.concatenate([np.repeat(np.arange(len(count_K)), stage) for stage in stage_VK] or [count_K[:0]])
    label_LK, rise_L = _components(pipe_KK, floor)
    weight_K = np.random.default_rng(0).integers(1, 1 << 63, len(count_K), dtype=np.uint64)
    value = np.unique(pipe_KK)
    remembered = min(len(data_V), REMEMBERED) if len(value) < 255 else 0
    tables = _Tables(
        pipe_KK, stage_VK, kind_VR, data_V, label_LK, rise_L, weight_K,
        *_grouped(stage_VK, data_V, label_LK, weight_K),
        np.zeros(len(data_V) + 1, np.int64), np.zeros(0, np.int64), np.zeros(0),
        value, np.zeros((remembered, remembered), np.uint8), floor, boundaries, problem.replicas,
    )  # fmt: skip
    count = _neighbours(tables, cut)
    tables = tables._replace(neighbour=np.zeros(count, np.int64), extra_of=np.zeros(count))
    _neighbours(tables, cut)
    return tables


def _by_kind(problem: Problem, twin_N: Ints) -> tuple[Floats, Floats, Ints]:
    """Pipeline and data-parallel seconds between any two kinds (a lone peer's own change nothing), and their sizes."""
    first, kind_N, count_K = np.unique(twin_N, return_inverse=True, return_counts=True)
    pipe_KK, data_KK = problem.pipe_NN[np.ix_(first, first)], problem.data_NN[np.ix_(first, first)]
    for kind, peer in enumerate(first):
        mates = np.flatnonzero((kind_N == kind) & (np.arange(problem.peers) != peer))
        data_KK[kind, kind] = problem.data_NN[peer, mates[0]] if len(mates) else 0.0
        pipe_KK[kind, kind] = problem.pipe_NN[peer, mates[0]] if len(mates) else problem.pipe_NN.max()
    return pipe_KK, data_KK, count_K


def _all_stages(count_K: Ints, replicas: int) -> Ints:
    """Every way to choose `replicas` peers by kind, V x K. Raises UserError if there are too many."""
    ways = np.zeros(replicas + 1)
    ways[0] = 1.0
    for count in count_K:
        ways = np.convolve(ways, np.ones(int(count) + 1))[: replicas + 1]
    if ways[replicas] > MOST_STAGES:
        raise UserError(
            f"a bound needs a swarm of few kinds of peers; with these {len(count_K)} kinds there are "
            f"{ways[replicas]:.3g} different stages of {replicas}, the most is {MOST_STAGES}"
        )
    partial = np.zeros((1, 0), np.int64)
    for kind, count in enumerate(count_K):
        free, behind = replicas - partial.sum(axis=1), int(count_K[kind + 1 :].sum())
        more = [np.arange(max(0, left - behind), min(left, count) + 1) for left in free]
        partial = np.column_stack((np.repeat(partial, [len(part) for part in more], axis=0), np.concatenate(more)))
    return partial


def _components(pipe_KK: Floats, floor: float) -> tuple[Ints, Floats]:
    """Each kind's component, level by level, from single kinds to all together, and the extra that merges them."""
    kinds = len(pipe_KK)
    label = np.arange(kinds)
    labels, rises = [label], list[float]()
    for one, two in sorted(((a, b) for a in range(kinds) for b in range(a)), key=lambda pair: float(pipe_KK[pair])):
        if label[one] != label[two]:
            label = np.where(label == label[one], label[two], label)
            if rises and rises[-1] == pipe_KK[one, two] - floor:
                labels[-1] = label
            else:
                labels.append(label)
                rises.append(pipe_KK[one, two] - floor)
    return np.array(labels), np.array([*rises, np.inf])


def _grouped(stage_VK: Ints, data_V: Floats, label_LK: Ints, weight_K: Words) -> tuple[Ints, Words, Ints, Floats, Ints]:
    """Groups, on each level, the stages with the same number in each component, by the hash of these numbers."""
    levels, count = len(label_LK), len(stage_VK)
    order_LV, key_LG = np.zeros((levels, count), np.int64), np.zeros((levels, count), np.uint64)
    first_LG, least_LG = np.zeros((levels, count + 1), np.int64), np.zeros((levels, count))
    groups_L = np.zeros(levels, np.int64)
    for level in range(levels):
        hashed = stage_VK.astype(np.uint64) @ weight_K[label_LK[level]]
        key, at, group_V = np.unique(hashed, return_index=True, return_inverse=True)
        groups_L[level] = len(key)
        order_LV[level] = np.argsort(group_V, kind="stable")
        key_LG[level, : len(key)], least_LG[level, : len(key)] = key, data_V[at]
        first_LG[level, 1 : len(key) + 1] = np.cumsum(np.bincount(group_V, minlength=len(key)))
    return order_LV, key_LG, first_LG, least_LG, groups_L


@compiled
def _neighbours(tables: _Tables, cut: float) -> int:
    """Fills in each stage's neighbours if `tables` has space for them. Returns how many there are."""
    levels = tables.rise_L.size
    if levels < 2:
        return 0
    count, space = 0, tables.neighbour.size
    for stage in range(tables.data_V.size):
        for other in range(tables.data_V.size):
            data = max(tables.data_V[stage], tables.data_V[other])
            limit = (cut - data) / 2 - tables.boundaries * tables.floor - 2 * tables.rise_L[levels - 2] + CLOSE
            if limit < 0:
                break
            extra = _extra(tables, stage, other, limit)
            if other != stage and extra < np.inf:
                if space > 0:
                    tables.neighbour[count], tables.extra_of[count] = other, extra
                count += 1
        tables.next_V[stage + 1] = count
    return count


# The enumeration


@inner
def _extra(tables: _Tables, one: int, two: int, limit: float) -> float:
    """What the boundary of two stages costs above the floor; inf where that exceeds `limit`."""
    memo_VV, value, highest = tables.memo_VV, tables.value, tables.floor + limit + CLOSE
    kept = max(one, two) < len(memo_VV)
    if kept and memo_VV[one, two] > 0:
        cost = float(value[memo_VV[one, two] - 1])
        return cost - tables.floor if cost <= highest else np.inf
    most = np.inf if kept else highest
    cost = local_search.boundary(tables.pipe_KK, tables.kind_VR, tables.replicas, one, two, most)[0]
    if kept:
        memo_VV[one, two] = memo_VV[two, one] = np.searchsorted(value, cost) + 1
    return cost - tables.floor if cost <= highest else np.inf


@inner
def _level(tables: _Tables, extra: float) -> int:
    """The finest level at which a boundary of this extra matches no peers of different components."""
    level = 0
    while tables.rise_L[level] <= extra + CLOSE:
        level += 1
    return level


@inner
def _by_component(tables: _Tables, level: int, need_K: Ints) -> Ints:
    """These numbers summed over each component of the level."""
    sums_K = np.zeros(need_K.size, np.int64)
    for kind in range(need_K.size):
        sums_K[tables.label_LK[level, kind]] += need_K[kind]
    return sums_K


@inner
def _group(tables: _Tables, level: int, need_K: Ints, stages: int) -> int:
    """The group of which `stages` stages have, in each component, as many peers as `need_K`; -1 if there is none."""
    sums_K = _by_component(tables, level, need_K)
    wanted = np.uint64(0)
    for kind in range(need_K.size):
        if sums_K[kind] < 0 or sums_K[kind] % stages != 0:
            return -1
        wanted += np.uint64(sums_K[kind] // stages) * tables.weight_K[kind]
    low, high = 0, tables.groups_L[level]
    while low < high:
        middle = (low + high) // 2
        if tables.key_LG[level, middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < tables.groups_L[level] and tables.key_LG[level, low] == wanted else -1


@inner
def _need(tables: _Tables, walk: _Enumeration, node: _Node, before: int, after: int) -> Ints:
    """The peers left once `before` stages like the left end and `after` like the right end are placed."""
    need_K: Ints = walk.left_K - (before * tables.stage_VK[node.left] + after * tables.stage_VK[node.right])
    return need_K


@inner
def _affordable(tables: _Tables, walk: _Enumeration, data: float) -> float:
    """The budget of extras of a path whose most expensive stage costs `data` seconds."""
    return float(walk.best[0] - CLOSE - data) / 2 - tables.boundaries * tables.floor


@inner
def _ruled_out(tables: _Tables, walk: _Enumeration, node: _Node) -> bool:
    """Whether arguments 2 and 3 rule out every path with this piece."""
    rest = _affordable(tables, walk, node.data) - node.spent
    if rest < 0:
        return True
    level = _level(tables, min(node.most, rest))
    need_K = _need(tables, walk, node, node.before, node.after)
    if _by_component(tables, level, need_K).any():
        return True
    single = _level(tables, rest / 2)
    return single < level and not _one_boundary_suffices(tables, walk, node, single, need_K)


@inner
def _one_boundary_suffices(tables: _Tables, walk: _Enumeration, node: _Node, level: int, need_K: Ints) -> bool:
    """Whether the one boundary that may exceed the level's extra has a possible place on either side."""
    if not _by_component(tables, level, need_K).any():
        return True
    for side in range(2):
        count = node.after if side else node.before
        for behind in range(1, count + 1):
            before, after = (node.before, count - behind) if side else (count - behind, node.after)
            group = _group(tables, level, _need(tables, walk, node, before, after), behind)
            if group >= 0:
                data = max(node.data, tables.least_LG[level, group])
                if _affordable(tables, walk, data) - node.spent >= tables.rise_L[level]:
                    return True
    return False


@compiled
def _split_at(tables: _Tables, walk: _Enumeration, two: int) -> None:
    """Enumerates every path that splits between stage `two` and a stage no more expensive (argument 1)."""
    stages, stage_VK = tables.boundaries + 1, tables.stage_VK
    data = tables.data_V[two]
    if _affordable(tables, walk, data) < 0:
        return
    level = _level(tables, _affordable(tables, walk, data) / 2)
    for before in range(1, stages):
        need_K = walk.count_K - (stages - before) * stage_VK[two]
        group = _group(tables, level, need_K, before)
        if group < 0:
            continue
        for place in range(tables.first_LG[level, group], tables.first_LG[level, group + 1]):
            one = tables.order_LV[level, place]
            if one > two:
                break
            walk.left_K[:] = walk.count_K - stage_VK[one] - stage_VK[two]
            if (walk.left_K < 0).any():
                continue
            extra = _extra(tables, one, two, _affordable(tables, walk, data))
            if extra < np.inf:
                walk.path_S[before - 1], walk.path_S[before] = one, two
                node = _Node(one, two, before - 1, stages - before - 1, data, extra, extra)
                if not _ruled_out(tables, walk, node):
                    _extend(tables, walk, node)


@compiled
def _extend(tables: _Tables, walk: _Enumeration, node: _Node) -> None:
    """Enumerates the paths with this piece: the next stage goes before the left end, or else after the right one."""
    if node.before + node.after == 0:
        cost = node.data + 2 * (node.spent + tables.boundaries * tables.floor)
        if cost < walk.best[0] - CLOSE:
            walk.best[0] = cost
            walk.found_S[:] = walk.path_S
        return
    end = node.left if node.before > 0 else node.right
    longer = _placed(tables, walk, node, end, False)
    if longer.before >= 0:
        _extend(tables, walk, longer)
        walk.left_K[:] += tables.stage_VK[end]
    rest = _affordable(tables, walk, node.data) - node.spent
    if rest < tables.rise_L[0] or tables.rise_L.size < 2:
        return  # any stage with other numbers than the end's costs that much
    last = tables.rise_L.size - 1
    level = _level(tables, min(node.most, rest - tables.rise_L[0]))
    twice = level == last
    if twice:  # after these, another boundary may connect components of the level below
        level = last - 1
        for place in range(tables.next_V[end], tables.next_V[end + 1]):
            if tables.extra_of[place] <= rest - tables.rise_L[level] + CLOSE:
                longer = _placed(tables, walk, node, tables.neighbour[place], False)
                if longer.before >= 0:
                    _extend(tables, walk, longer)
                    walk.left_K[:] += tables.stage_VK[tables.neighbour[place]]
    count, other = (node.before, node.after) if node.before > 0 else (node.after, 0)
    group = _group(tables, level, _need(tables, walk, node, 0, other), count)
    if group >= 0:
        for place in range(tables.first_LG[level, group], tables.first_LG[level, group + 1]):
            stage = tables.order_LV[level, place]
            if stage != end:
                longer = _placed(tables, walk, node, stage, twice)
                if longer.before >= 0:
                    _extend(tables, walk, longer)
                    walk.left_K[:] += tables.stage_VK[stage]


@inner
def _placed(tables: _Tables, walk: _Enumeration, node: _Node, stage: int, twice: bool) -> _Node:
    """The longer piece with this stage placed next and its peers taken; `before` is -1 if it is ruled out.

    `twice`: stages after which another boundary may connect components of the last level but one were tried before.
    """
    none = _Node(0, 0, -1, 0, 0.0, 0.0, 0.0)
    for kind in range(walk.left_K.size):
        if tables.stage_VK[stage, kind] > walk.left_K[kind]:
            return none
    data = max(node.data, tables.data_V[stage])
    limit = min(node.most, _affordable(tables, walk, data) - node.spent)
    if limit < 0:
        return none
    first = node.before > 0
    extra = _extra(tables, node.left if first else node.right, stage, limit)
    if extra == np.inf:
        return none
    if twice and extra <= _affordable(tables, walk, data) - node.spent - tables.rise_L[tables.rise_L.size - 2]:
        return none
    walk.left_K[:] -= tables.stage_VK[stage]
    if first:
        walk.path_S[node.before - 1] = stage
        longer = _Node(stage, node.right, node.before - 1, node.after, data, node.spent + extra, node.most)
    else:
        walk.path_S[walk.path_S.size - node.after] = stage
        longer = _Node(node.left, stage, 0, node.after - 1, data, node.spent + extra, node.most)
    if _ruled_out(tables, walk, longer):
        walk.left_K[:] += tables.stage_VK[stage]
        return none
    return longer


def _slots(tables: _Tables, walk: _Enumeration, twin_N: Ints, cut: float) -> Ints | None:
    """The layout that was found, as slots; None if there is none below `cut`."""
    if walk.best[0] >= cut:
        return None
    kind_N = np.unique(twin_N, return_inverse=True)[1]
    peers = [list(np.flatnonzero(kind_N == kind)) for kind in range(len(walk.count_K))]
    kinds = tables.kind_VR.reshape(len(tables.data_V), -1)[walk.found_S]
    return np.array([peers[kind].pop() for kind in kinds.ravel()])
