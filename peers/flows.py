"""Where routes should run, as a flow: the prior for which peers a micro-batch visits, and how far each carries it.

Every peer solves this for itself from the roster, in which speeds are measured; equal rosters give equal flows. As a
linear programme (HiGHS) over hops (peer i carries from cut a to cut b, cuts being where fragments meet):

    z_iab >= 0                                         micro-batches' tokens/s on that hop
    sum_ia z_iab = sum_jc z_jbc          at each cut b between the ends
    sum_ab z_iab share_ab <= speed_i                   every second has one second
    maximise sum_ib z_i0b - HOP_COST sum z             a hop must carry more than it costs

Links are not in it: their delay costs a hop, and what they cannot carry shows in the times that routes measure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from decentral.comm.pace import Prior
from decentral.core.ids import PeerId
from decentral.core.jobs import Fragment

HOP_COST = 0.01  # of the flow: so much throughput is given up for one hop less
MOST_HOPS = 20_000  # variables; a larger swarm goes without a prior, by measured times alone


@dataclass(frozen=True, slots=True)
class Place:
    """A peer's fragments [begin, end) and its speed in tokens/s of the whole model."""

    peer: PeerId
    begin: int
    end: int
    tokens_per_s: float


def solve(cuts: Sequence[Fragment], places: Sequence[Place], own: PeerId) -> Prior:
    """How far `own` should carry what enters where, and who should carry on from each cut. Empty if nothing flows."""
    hops = [
        (index, a, b)
        for index, place in enumerate(places)
        for a in range(place.begin, place.end)
        for b in range(a + 1, place.end + 1)
    ]
    total = sum(place.tokens_per_s for place in places)
    if not hops or len(hops) > MOST_HOPS or total <= 0:
        return Prior()
    rates = _rates(cuts, places, hops, total)
    layers = [*(cut.first for cut in cuts), cuts[-1].last]
    prior = Prior(tokens_per_s=float(sum(rate for (_, a, _), rate in zip(hops, rates, strict=True) if a == 0)) * total)
    for (index, a, b), rate in zip(hops, rates, strict=True):
        if rate <= 1e-6:
            continue
        peer = places[index].peer
        if peer == own:
            prior.ends.setdefault(layers[a], {})[layers[b]] = float(rate)
        nexts = prior.nexts.setdefault(layers[a], {})
        nexts[peer] = nexts.get(peer, 0.0) + float(rate)
    return prior


def _rates(
    cuts: Sequence[Fragment], places: Sequence[Place], hops: Sequence[tuple[int, int, int]], total: float
) -> list[float]:
    """z of each hop, in parts of the sum of all speeds."""
    whole = sum(cut.parameters for cut in cuts)
    before = np.concatenate(([0.0], np.cumsum([cut.parameters / whole for cut in cuts])))
    index, a, b = np.array(hops).T
    count, inner = len(hops), len(cuts) - 1
    column = np.arange(count)
    work = coo_matrix((before[b] - before[a], (index, column)), shape=(len(places), count))
    speed = np.array([place.tokens_per_s / total for place in places])
    into, out = b < len(cuts), a > 0
    values = np.concatenate((np.ones(into.sum()), -np.ones(out.sum())))
    rows, columns = np.concatenate((b[into], a[out])) - 1, np.concatenate((column[into], column[out]))
    balance = coo_matrix((values, (rows, columns)), shape=(inner, count)) if inner else None
    found = linprog(
        np.where(a == 0, -1.0, 0.0) + HOP_COST, work.tocsr(), speed, balance.tocsr() if balance is not None else None,
        np.zeros(inner) if inner else None, method="highs",
    )  # fmt: skip
    assert found.status == 0, found.message
    return [max(0.0, float(rate)) for rate in found.x]
