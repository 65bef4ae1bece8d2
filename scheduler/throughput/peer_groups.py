"""Divide a large swarm into groups of peers, each of which can hold the whole model. Start at `groups`."""

import numpy as np

from decentral.scheduler.throughput.max_flow import held
from decentral.scheduler.throughput.peer_kinds import anywhere
from decentral.scheduler.throughput.rows import Supplies, in_rows_of_regions
from decentral.scheduler.topology.arrays import Floats, Ints

AMPLE_MEMORY = 1.25  # peers can hold the model if their longest spans together have this many times the model's layers
GROUP_PEERS = 40  # a region with more peers is divided into groups of about this many


def groups(problem: Supplies, region_N: Ints) -> list[Ints]:
    """Return the groups, each as an array of peers' numbers.

    Peers that can each hold the whole model are one group, as they need no links. The other peers without a site whose
    own access limits all their links are one group too, wherever they are. The remaining peers are grouped by region. A
    large region is divided, unless its peers share a link, which two groups would count twice. A group that cannot hold
    the model is joined to another group with a fast link to it. If only one group is left, it may still be unable to
    hold the model.
    """
    costs = problem.costs
    alone_N = problem.reach_NL[:, 0] == costs.layers
    anywhere_N = anywhere(costs) & ~alone_N
    found = [np.flatnonzero(some_N) for some_N in (alone_N, anywhere_N) if some_N.any()]
    rest_N = ~alone_N & ~anywhere_N
    for region in np.unique(region_N[rest_N]):
        found += _divided(problem, np.flatnonzero(rest_N & (region_N == region)))
    size_G = np.array([_copies(problem, group) for group in found])
    weak_G = np.array([not _can_hold(problem, region_N, group) for group in found])
    link_GG = _links(problem, found)
    while len(found) > 1 and weak_G.any():
        weak = int(np.argmax(np.where(weak_G, size_G, -1.0)))
        near = _partner(weak, link_GG, size_G, weak_G)
        found[near] = np.sort(np.concatenate((found[near], found[weak])))
        size_G[near] += size_G[weak]
        weak_G[near] = weak_G[near] and not _can_hold(problem, region_N, found[near])
        link_GG[near] = link_GG[:, near] = np.maximum(link_GG[near], link_GG[weak])
        link_GG[near, near] = -1.0
        del found[weak]
        size_G, weak_G = np.delete(size_G, weak), np.delete(weak_G, weak)
        link_GG = np.delete(np.delete(link_GG, weak, axis=0), weak, axis=1)
    return found


def _partner(weak: int, link_GG: Floats, size_G: Floats, weak_G: Ints) -> int:
    """Return the group to which a group that cannot hold the model is joined.

    Of the groups with the fastest link: the smallest that also lacks memory and suffices for both; else the largest
    that lacks memory; else the smallest.
    """
    fastest = np.flatnonzero(link_GG[weak] >= link_GG[weak].max())
    others = fastest[weak_G[fastest]]
    enough = others[size_G[others] + size_G[weak] >= AMPLE_MEMORY]
    if len(enough) or not len(others):
        choice = enough if len(enough) else fastest
        return int(choice[np.argmin(size_G[choice])])
    return int(others[np.argmax(size_G[others])])


def _divided(problem: Supplies, region: Ints) -> list[Ints]:
    """Return the peers of a region in groups with about equal total memory; in one group if they share a link."""
    costs = problem.costs
    parts = 1 if costs.site_N[region[0]] >= 0 else -(-len(region) // GROUP_PEERS)
    parts = max(1, min(parts, int(_copies(problem, region) / AMPLE_MEMORY)))
    by_memory = region[np.argsort(-costs.memory_N[region], kind="stable")]
    return [np.sort(by_memory[part::parts]) for part in range(parts)]


def _copies(problem: Supplies, group: Ints) -> float:
    """Return how many copies of the model's layers the longest spans of a group's peers have together."""
    layers = problem.costs.layers
    return float((problem.reach_NL[group] - np.arange(layers)).max(axis=1).sum()) / layers


def _can_hold(problem: Supplies, region_N: Ints, group: Ints) -> bool:
    """Return whether a group can hold the model: it has ample memory, or `in_rows_of_regions` places all layers."""
    copies = _copies(problem, group)
    if not 1 <= copies < AMPLE_MEMORY:
        return copies >= 1
    spans_N2 = np.zeros((problem.costs.peers, 2), np.int64)
    spans_N2[group] = in_rows_of_regions(problem, region_N[group], group)
    return bool(held(problem.costs, spans_N2).any(axis=0).all())


def _links(problem: Supplies, found: list[Ints]) -> Floats:
    """Return the bytes/s of the fastest link between each two groups; -1 from a group to itself."""
    number_N = np.empty(problem.costs.peers, np.int64)
    for number, group in enumerate(found):
        number_N[group] = number
    link_GG = np.zeros((len(found), len(found)))
    np.maximum.at(link_GG, (number_N[:, None], number_N[None, :]), problem.costs.link_NN)
    np.fill_diagonal(link_GG, -1.0)
    return link_GG
