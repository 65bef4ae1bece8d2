"""Whether any layout of a swarm of few kinds costs less than so many seconds: a better layout, or the proof of none.

Peers that the links cannot tell apart (of one city, say) are one kind, and a stage is how many of each kind it has:
64 peers of ten kinds have about 23,000 stages of eight. A layout is a path of S of them that together use each kind
up. It costs its dearest stage, and twice its S - 1 joints. Every joint costs at least the fastest link (`floor`);
what it costs above that is its `extra`. A layout below `cut` can spend `budget` on extras, which is half of what
`cut` leaves over its dearest stage and twice S - 1 floors. All such layouts are enumerated, but for what three
arguments rule out:

1. Split the path at the joint of largest extra. No other joint has more than that, nor than what is left of the
   budget. So budget / 2 limits them from the start.
2. Take the kinds' components under links of extra at most x. Over a joint of at most x nobody leaves a component:
   neighbours have as many peers in each. So if no joint to come may exceed x, the p stages still to place before
   the left end have its numbers, the q after the right end have that one's, and the peers that are left must be p
   times the one and q times the other, component by component. Only fewer than K of the x matter: where components
   merge.
3. If at most one joint to come may exceed x, then the stages behind that joint, p - i of them, have one number in
   each component, so what is left after i and q must be p - i times that of some stage that is cheap enough.

Nothing is rounded the unsafe way: sums are counted in whole peers, components are compared by linear hashes (equal
numbers always have equal hashes), and costs with a tolerance of 1e-9 s.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Floats, Ints
from decentral.scheduler.shared.machine_code import compiled, inner
from decentral.scheduler.shared.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.sync import local_search
from decentral.scheduler.sync.layout_cost import Problem, layout

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
MOST_STAGES = 60_000  # different ones; the time grows with their square, and faster with the budget of extras
REMEMBERED = 6_000  # stages, cheapest first, between which joints are remembered
CLOSE = 1e-9  # seconds


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """`slots` of a layout below the cut, the cheapest found, or None; `proven`: there is no cheaper one."""

    slots: Ints | None
    cost: float
    proven: bool


def below(problem: Problem, cut: float, budget: SearchBudget) -> Verdict:
    """Searches all layouts that cost less than `cut` seconds. Raises UserError for swarms of too many kinds.

    Looks at the clock once for every stage, which can take seconds.
    """
    if problem.stages * problem.replicas != len(problem):
        raise UserError("a bound needs stages * replicas = peers: with peers to spare there is none yet")
    if problem.stages == 1:
        only = layout(problem, np.arange(len(problem))).cost.total
        return Verdict(np.arange(len(problem)), only, True) if only < cut - CLOSE else Verdict(None, cut, True)
    most = problem.replicas * problem.data_NN.max() + 2 * problem.stages * problem.pipe_NN.max()
    cut = min(cut, float(most) + 1.0)
    twin_N = local_search.twins(problem.data_NN, problem.pipe_NN)
    tables = _tables(problem, twin_N, cut)
    count_K = np.bincount(np.unique(twin_N, return_inverse=True)[1])
    path = np.zeros(problem.stages, np.int64)
    hunt = _Hunt(count_K, count_K.copy(), path, path.copy(), np.array([cut]))
    progress = SearchProgress(budget, cut)
    for stage in range(len(tables.dear_V)):
        if not progress.goes_on():
            return Verdict(_slots(tables, hunt, twin_N, cut), float(hunt.best[0]), False)
        _split_at(tables, hunt, stage)
        progress.report(float(hunt.best[0]))
    return Verdict(_slots(tables, hunt, twin_N, cut), float(hunt.best[0]), True)


class _Tables(NamedTuple):
    """K kinds, V stages (in order of their data-parallel cost), L levels of components (the last is all in one)."""

    pipe_KK: Floats
    stage_VK: Ints  # how many of each kind
    kind_VR: Ints  # the same, one by one, flat
    dear_V: Floats
    label_LK: Ints  # each kind's component
    rise_L: Floats  # a joint of less extra leaves no component of this level
    weight_K: Words  # of the hash
    order_LV: Ints  # stages, those with the same numbers in each component together
    key_LG: Words  # the hash of each such group, ascending
    first_LG: Ints  # where the group begins in order_LV
    least_LG: Floats  # its cheapest stage's data-parallel cost
    groups_L: Ints
    next_V: Ints  # where a stage's neighbours begin: those by joints after which the last finite rise is affordable
    neighbour: Ints
    extra_of: Floats
    value: Floats  # all costs of links, ascending
    memo_VV: Bytes  # 1 + the place in `value` of a joint's cost; 0: not known yet
    floor: float
    joints: int
    replicas: int


class _Hunt(NamedTuple):
    """What the enumeration writes to."""

    count_K: Ints  # all peers
    left_K: Ints  # peers not placed yet
    path_S: Ints
    found_S: Ints
    best: Floats  # one number, seconds


class _Node(NamedTuple):
    """A piece of a path: its two ends, how many stages are to come before and after, and what it costs."""

    left: int
    right: int
    before: int
    after: int
    dear: float
    spent: float  # extras so far
    most: float  # extra of the joint at which the path was split: the largest


# Tables


def _tables(problem: Problem, twin_N: Ints, cut: float) -> _Tables:
    pipe_KK, data_KK, count_K = _by_kind(problem, twin_N)
    floor, joints = float(pipe_KK.min()), problem.stages - 1
    stage_VK = _all_stages(count_K, problem.replicas)
    dear_V = np.where(stage_VK > 0, stage_VK @ data_KK - np.diag(data_KK), 0.0).max(axis=1)
    order = np.argsort(dear_V, kind="stable")
    order = order[dear_V[order] + 2 * joints * floor < cut]
    stage_VK, dear_V = np.ascontiguousarray(stage_VK[order]), dear_V[order]
    kind_VR = np.concatenate([np.repeat(np.arange(len(count_K)), stage) for stage in stage_VK] or [count_K[:0]])
    label_LK, rise_L = _components(pipe_KK, floor)
    weight_K = np.random.default_rng(0).integers(1, 1 << 63, len(count_K), dtype=np.uint64)
    value = np.unique(pipe_KK)
    remembered = min(len(dear_V), REMEMBERED) if len(value) < 255 else 0
    tables = _Tables(
        pipe_KK, stage_VK, kind_VR, dear_V, label_LK, rise_L, weight_K,
        *_grouped(stage_VK, dear_V, label_LK, weight_K),
        np.zeros(len(dear_V) + 1, np.int64), np.zeros(0, np.int64), np.zeros(0),
        value, np.zeros((remembered, remembered), np.uint8), floor, joints, problem.replicas,
    )  # fmt: skip
    count = _neighbours(tables, cut)
    tables = tables._replace(neighbour=np.zeros(count, np.int64), extra_of=np.zeros(count))
    _neighbours(tables, cut)
    return tables


def _by_kind(problem: Problem, twin_N: Ints) -> tuple[Floats, Floats, Ints]:
    """Seconds between kinds, and within one (of a lone peer: what changes nothing), and how many are of each."""
    first, kind_N, count_K = np.unique(twin_N, return_inverse=True, return_counts=True)
    pipe_KK, data_KK = problem.pipe_NN[np.ix_(first, first)], problem.data_NN[np.ix_(first, first)]
    for kind, peer in enumerate(first):
        mates = np.flatnonzero((kind_N == kind) & (np.arange(len(problem)) != peer))
        data_KK[kind, kind] = problem.data_NN[peer, mates[0]] if len(mates) else 0.0
        pipe_KK[kind, kind] = problem.pipe_NN[peer, mates[0]] if len(mates) else problem.pipe_NN.max()
    return pipe_KK, data_KK, count_K


def _all_stages(count_K: Ints, replicas: int) -> Ints:
    """Every way to choose so many peers by kind, V x K."""
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
        room, behind = replicas - partial.sum(axis=1), int(count_K[kind + 1 :].sum())
        more = [np.arange(max(0, left - behind), min(left, count) + 1) for left in room]
        partial = np.column_stack((np.repeat(partial, [len(part) for part in more], axis=0), np.concatenate(more)))
    return partial


def _components(pipe_KK: Floats, floor: float) -> tuple[Ints, Floats]:
    """Level by level each kind's component, from every kind alone to all together, and what leads to the next."""
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


def _grouped(stage_VK: Ints, dear_V: Floats, label_LK: Ints, weight_K: Words) -> tuple[Ints, Words, Ints, Floats, Ints]:
    """The stages of each level with the same number in each component, found by the hash of these numbers."""
    levels, count = len(label_LK), len(stage_VK)
    order_LV, key_LG = np.zeros((levels, count), np.int64), np.zeros((levels, count), np.uint64)
    first_LG, least_LG = np.zeros((levels, count + 1), np.int64), np.zeros((levels, count))
    groups_L = np.zeros(levels, np.int64)
    for level in range(levels):
        hashed = stage_VK.astype(np.uint64) @ weight_K[label_LK[level]]
        key, at, group_V = np.unique(hashed, return_index=True, return_inverse=True)
        groups_L[level] = len(key)
        order_LV[level] = np.argsort(group_V, kind="stable")
        key_LG[level, : len(key)], least_LG[level, : len(key)] = key, dear_V[at]
        first_LG[level, 1 : len(key) + 1] = np.cumsum(np.bincount(group_V, minlength=len(key)))
    return order_LV, key_LG, first_LG, least_LG, groups_L


@compiled
def _neighbours(tables: _Tables, cut: float) -> int:
    """Fills in each stage's neighbours where there is room for them. Returns how many there are."""
    levels = tables.rise_L.size
    if levels < 2:
        return 0
    count, room = 0, tables.neighbour.size
    for stage in range(tables.dear_V.size):
        for other in range(tables.dear_V.size):
            dear = max(tables.dear_V[stage], tables.dear_V[other])
            limit = (cut - dear) / 2 - tables.joints * tables.floor - 2 * tables.rise_L[levels - 2] + CLOSE
            if limit < 0:
                break
            extra = _extra(tables, stage, other, limit)
            if other != stage and extra < np.inf:
                if room > 0:
                    tables.neighbour[count], tables.extra_of[count] = other, extra
                count += 1
        tables.next_V[stage + 1] = count
    return count


# The enumeration


@inner
def _extra(tables: _Tables, one: int, two: int, limit: float) -> float:
    """What joining two stages costs above the floor; inf where that exceeds `limit`."""
    memo_VV, value, highest = tables.memo_VV, tables.value, tables.floor + limit + CLOSE
    kept = max(one, two) < len(memo_VV)
    if kept and memo_VV[one, two] > 0:
        cost = float(value[memo_VV[one, two] - 1])
        return cost - tables.floor if cost <= highest else np.inf
    most = np.inf if kept else highest
    cost = local_search.joint(tables.pipe_KK, tables.kind_VR, tables.replicas, one, two, most)[0]
    if kept:
        memo_VV[one, two] = memo_VV[two, one] = np.searchsorted(value, cost) + 1
    return cost - tables.floor if cost <= highest else np.inf


@inner
def _level(tables: _Tables, extra: float) -> int:
    """The finest components that no joint of so much extra leaves."""
    level = 0
    while tables.rise_L[level] <= extra + CLOSE:
        level += 1
    return level


@inner
def _group(tables: _Tables, level: int, need_K: Ints, stages: int) -> int:
    """The group of stages of which so many have in each component what `need_K` has; -1 if there is none."""
    sums_K = np.zeros(need_K.size, np.int64)
    for kind in range(need_K.size):
        sums_K[tables.label_LK[level, kind]] += need_K[kind]
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
def _need(tables: _Tables, hunt: _Hunt, node: _Node, before: int, after: int) -> Ints:
    """The peers left once so many stages equal to the left end and to the right end are placed."""
    need_K = np.empty(hunt.left_K.size, np.int64)
    for kind in range(need_K.size):
        ends = before * tables.stage_VK[node.left, kind] + after * tables.stage_VK[node.right, kind]
        need_K[kind] = hunt.left_K[kind] - ends
    return need_K


@inner
def _affordable(tables: _Tables, hunt: _Hunt, dear: float) -> float:
    """The budget of extras of a path whose dearest stage costs so much."""
    return float(hunt.best[0] - CLOSE - dear) / 2 - tables.joints * tables.floor


@inner
def _hopeless(tables: _Tables, hunt: _Hunt, node: _Node) -> bool:
    """Whether arguments 2 and 3 rule out every way to go on."""
    rest = _affordable(tables, hunt, node.dear) - node.spent
    if rest < 0:
        return True
    level = _level(tables, min(node.most, rest))
    need_K, sums_K = _need(tables, hunt, node, node.before, node.after), np.zeros(hunt.left_K.size, np.int64)
    for kind in range(need_K.size):
        sums_K[tables.label_LK[level, kind]] += need_K[kind]
    for kind in range(need_K.size):
        if sums_K[kind] != 0:
            return True
    single = _level(tables, rest / 2)
    return single < level and not _one_joint_does(tables, hunt, node, single, need_K)


@inner
def _one_joint_does(tables: _Tables, hunt: _Hunt, node: _Node, level: int, need_K: Ints) -> bool:
    """Whether some place on either side is right for the one joint that may leave the level's components."""
    sums_K = np.zeros(need_K.size, np.int64)
    for kind in range(need_K.size):
        sums_K[tables.label_LK[level, kind]] += need_K[kind]
    if not sums_K.any():
        return True
    for side in range(2):
        count = node.after if side else node.before
        for behind in range(1, count + 1):
            before, after = (node.before, count - behind) if side else (count - behind, node.after)
            group = _group(tables, level, _need(tables, hunt, node, before, after), behind)
            if group >= 0:
                dear = max(node.dear, tables.least_LG[level, group])
                if _affordable(tables, hunt, dear) - node.spent >= tables.rise_L[level]:
                    return True
    return False


@compiled
def _split_at(tables: _Tables, hunt: _Hunt, two: int) -> None:
    """Every path whose largest extra is at a joint of stage `two` with one that is no dearer (argument 1)."""
    stages, stage_VK = tables.joints + 1, tables.stage_VK
    dear = tables.dear_V[two]
    if _affordable(tables, hunt, dear) < 0:
        return
    level = _level(tables, _affordable(tables, hunt, dear) / 2)
    for before in range(1, stages):
        need_K = hunt.count_K - (stages - before) * stage_VK[two]
        group = _group(tables, level, need_K, before)
        if group < 0:
            continue
        for place in range(tables.first_LG[level, group], tables.first_LG[level, group + 1]):
            one = tables.order_LV[level, place]
            if one > two:
                break
            hunt.left_K[:] = hunt.count_K - stage_VK[one] - stage_VK[two]
            if (hunt.left_K < 0).any():
                continue
            extra = _extra(tables, one, two, _affordable(tables, hunt, dear))
            if extra < np.inf:
                hunt.path_S[before - 1], hunt.path_S[before] = one, two
                node = _Node(one, two, before - 1, stages - before - 1, dear, extra, extra)
                if not _hopeless(tables, hunt, node):
                    _go_on(tables, hunt, node)


@compiled
def _go_on(tables: _Tables, hunt: _Hunt, node: _Node) -> None:
    """Every way to go on from here: one more stage before the left end, or else after the right end."""
    if node.before + node.after == 0:
        cost = node.dear + 2 * (node.spent + tables.joints * tables.floor)
        if cost < hunt.best[0] - CLOSE:
            hunt.best[0] = cost
            hunt.found_S[:] = hunt.path_S
        return
    end = node.left if node.before > 0 else node.right
    longer = _placed(tables, hunt, node, end, False)
    if longer.before >= 0:
        _go_on(tables, hunt, longer)
        hunt.left_K[:] += tables.stage_VK[end]
    rest = _affordable(tables, hunt, node.dear) - node.spent
    if rest < tables.rise_L[0] or tables.rise_L.size < 2:
        return  # whoever is not as the end costs that much
    last = tables.rise_L.size - 1
    level = _level(tables, min(node.most, rest - tables.rise_L[0]))
    twice = level == last
    if twice:  # these may be followed by another joint that leaves the components below
        level = last - 1
        for place in range(tables.next_V[end], tables.next_V[end + 1]):
            if tables.extra_of[place] <= rest - tables.rise_L[level] + CLOSE:
                longer = _placed(tables, hunt, node, tables.neighbour[place], False)
                if longer.before >= 0:
                    _go_on(tables, hunt, longer)
                    hunt.left_K[:] += tables.stage_VK[tables.neighbour[place]]
    group = _next_group(tables, hunt, node, level)
    if group >= 0:
        for place in range(tables.first_LG[level, group], tables.first_LG[level, group + 1]):
            stage = tables.order_LV[level, place]
            if stage != end:
                longer = _placed(tables, hunt, node, stage, twice)
                if longer.before >= 0:
                    _go_on(tables, hunt, longer)
                    hunt.left_K[:] += tables.stage_VK[stage]


@inner
def _next_group(tables: _Tables, hunt: _Hunt, node: _Node, level: int) -> int:
    """The stages that may come next where no joint after that leaves the level's components."""
    if node.before > 0:
        return _group(tables, level, _need(tables, hunt, node, 0, node.after), node.before)
    return _group(tables, level, _need(tables, hunt, node, 0, 0), node.after)


@inner
def _placed(tables: _Tables, hunt: _Hunt, node: _Node, stage: int, twice: bool) -> _Node:
    """The longer piece with this stage placed next, its peers taken; before = -1, nothing taken: it is ruled out.

    `twice`: what may be followed by a joint that leaves the components of the last level but one was tried before.
    """
    none = _Node(0, 0, -1, 0, 0.0, 0.0, 0.0)
    for kind in range(hunt.left_K.size):
        if tables.stage_VK[stage, kind] > hunt.left_K[kind]:
            return none
    dear = max(node.dear, tables.dear_V[stage])
    limit = min(node.most, _affordable(tables, hunt, dear) - node.spent)
    if limit < 0:
        return none
    first = node.before > 0
    extra = _extra(tables, node.left if first else node.right, stage, limit)
    if extra == np.inf:
        return none
    if twice and extra <= _affordable(tables, hunt, dear) - node.spent - tables.rise_L[tables.rise_L.size - 2]:
        return none
    hunt.left_K[:] -= tables.stage_VK[stage]
    if first:
        hunt.path_S[node.before - 1] = stage
        longer = _Node(stage, node.right, node.before - 1, node.after, dear, node.spent + extra, node.most)
    else:
        hunt.path_S[hunt.path_S.size - node.after] = stage
        longer = _Node(node.left, stage, 0, node.after - 1, dear, node.spent + extra, node.most)
    if _hopeless(tables, hunt, longer):
        hunt.left_K[:] += tables.stage_VK[stage]
        return none
    return longer


def _slots(tables: _Tables, hunt: _Hunt, twin_N: Ints, cut: float) -> Ints | None:
    """The layout that was found, by peers."""
    if hunt.best[0] >= cut:
        return None
    kind_N = np.unique(twin_N, return_inverse=True)[1]
    peers = [list(np.flatnonzero(kind_N == kind)) for kind in range(len(hunt.count_K))]
    kinds = tables.kind_VR.reshape(len(tables.dear_V), -1)[hunt.found_S]
    return np.array([peers[kind].pop() for kind in kinds.ravel()])
