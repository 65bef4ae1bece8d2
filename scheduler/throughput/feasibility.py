"""Compute how much of each device, memory and link a finished throughput plan uses (`uses`), apart from the planner.

The computation follows the plan's routes hop by hop and counts bytes for each direction of each pair of peers. It
shares no code with the planner's linear programme (max_flow.py), so that it finds the planner's mistakes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decentral.scheduler.throughput.layer_costs import ROUND_S, LayerCosts
from decentral.scheduler.topology.arrays import Floats
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.topology import Topology


@dataclass(frozen=True, slots=True)
class Use:
    """The highest utilisation of one kind of resource: the used share, 1 if it is full, and the peer, link or site."""

    share: float
    whose: str


def uses(plan: ThroughputPlan, topology: Topology, costs: LayerCosts) -> dict[str, Use]:
    """Return the highest utilisation of any "device", "memory", "uplink", "downlink", "link" and "shared link".

    Args:
        plan: The plan, with its spans, micro-batches, routes and gossip partners.
        topology: The peers and links for which the plan was made.
        costs: What the planned model costs these peers.

    Raises:
        ValueError: If a route does not lead through all layers in order, or through a layer that its peer does not
            hold; no device can follow such a plan.
    """
    index = {name: number for number, name in enumerate(topology.ids)}
    busy_N, kept_N = np.zeros(len(topology)), np.zeros(len(topology))
    sent_NN = np.zeros((len(topology), len(topology)))
    for route in plan.routes:
        rate, hops = route["share"] * plan.throughput["estimated"], route["hops"]
        _check(plan, hops, costs.layers)
        for (name, first, last), seconds in zip(hops, _kept_s(plan, hops, topology, costs), strict=True):
            busy_N[index[name]] += rate * costs.seconds_NL[index[name], first:last].sum()
            if len(hops) > 1:  # by Little's law, the sequences kept at a time are their rate * the seconds of each
                kept_N[index[name]] += rate * seconds * costs.activation_L[first:last].sum() / _context(plan)
        for (sender, _, _), (receiver, _, _) in itertools.pairwise(hops):
            sent_NN[index[sender], index[receiver]] += rate * costs.hidden_bytes  # activations
            sent_NN[index[receiver], index[sender]] += rate * costs.hidden_bytes  # their gradients
    before = [0.0, *np.cumsum(costs.snapshot_L * ROUND_S).tolist()]  # bytes of the snapshots of all layers before
    for name, partners in plan.gossip["weights"].items():
        (first, last), every_s = plan.spans.get(name, (0, 0)), plan.gossip["every_s"].get(name, np.inf)
        for partner, weight in partners.items():
            begin, end = plan.spans[partner]
            common = before[max(first, begin, min(last, end))] - before[max(first, begin)]
            sent_NN[index[partner], index[name]] += weight / every_s * common
    memory = [
        max(
            costs.bytes_of(first, last, plan.micro_batches[name] * costs.least_in_flight(first, last)),
            costs.state_L[first:last].sum() + kept_N[index[name]],
        )
        / costs.memory_N[index[name]]
        for name, (first, last) in plan.spans.items()
    ]
    return {
        "device": _greatest(busy_N, topology.ids),
        "memory": _greatest(np.array(memory), list(plan.spans)),
        "uplink": _greatest(sent_NN.sum(axis=1) / topology.up, topology.ids),
        "downlink": _greatest(sent_NN.sum(axis=0) / topology.down, topology.ids),
        "link": _greatest_link(sent_NN / topology.bandwidth, topology.ids),
        "shared link": _greatest_site(sent_NN, topology),
    }


def _context(plan: ThroughputPlan) -> int:
    """Return the number of tokens in a sequence."""
    return int(plan.planned_for["context"])


def _kept_s(
    plan: ThroughputPlan, hops: Sequence[tuple[str, int, int]], topology: Topology, costs: LayerCosts
) -> list[float]:
    """Return, for each hop of a route, how long (s) a micro-batch occupies the hop's memory if it never waits."""
    if len(hops) == 1:
        return [0.0]
    tokens = plan.micro_batches[hops[0][0]] * _context(plan)
    kept, later_s, after = list[float](), 0.0, -1
    for name, first, last in reversed(hops):
        at = topology.ids.index(name)
        later_s += tokens * float(costs.seconds_NL[at, first:last].sum())
        for one, other in ((at, after), (after, at)) if after >= 0 else ():
            later_s += float(
                topology.delay_s[one, other] + tokens * costs.hidden_bytes / topology.bandwidth[one, other]
            )
        kept.append(later_s)
        after = at
    return kept[::-1]


def _check(plan: ThroughputPlan, hops: Sequence[tuple[str, int, int]], layers: int) -> None:
    """Raise ValueError if the hops of a route are impossible."""
    at = 0
    for name, first, last in hops:
        begin, end = plan.spans.get(name, (0, 0))
        if first != at or not begin <= first < last <= end:
            holds = f"{name} holds layers {begin} to {end - 1}"
            raise ValueError(f"a route computes layers {first} to {last - 1} in {name}, after {at} layers; {holds}")
        at = last
    if at != layers:
        raise ValueError(f"a route ends after {at} of {layers} layers")


def _greatest(share_N: Floats, names: Sequence[str]) -> Use:
    most = int(np.argmax(share_N))
    return Use(float(share_N[most]), names[most])


def _greatest_link(share_NN: Floats, names: Sequence[str]) -> Use:
    sender, receiver = divmod(int(np.argmax(share_NN)), len(names))
    return Use(float(share_NN[sender, receiver]), f"{names[sender]} to {names[receiver]}")


def _greatest_site(sent_NN: Floats, topology: Topology) -> Use:
    greatest = Use(0.0, "")
    region_N = np.array(topology.regions)
    for site in topology.sites:
        inside = region_N == site.region
        share = max(sent_NN[inside][:, ~inside].sum() / site.up, sent_NN[~inside][:, inside].sum() / site.down)
        greatest = max(greatest, Use(float(share), site.region), key=lambda use: use.share)
    return greatest
