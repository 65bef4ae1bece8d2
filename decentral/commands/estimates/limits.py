"""Say what limits a swarm's tokens/s: the resource of which twice as much would give the most. Start at `of_routes`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from decentral.commands.estimates.peer_devices import PeerDevice
from decentral.commands.estimates.playing import MOST_PLAYED
from decentral.core.config import Config
from decentral.core.layer_work import KindCosts
from decentral.scheduler.throughput import feasibility
from decentral.scheduler.throughput.planning import problem_of
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.topology import Topology

LINKS = ("uplink", "downlink", "link", "shared link")  # the kinds of `feasibility.uses` that are links
LIMITS_FROM = 1.05  # a resource of which twice as much gives less than this many times the tokens/s is no limit


def of_routes(
    plan: ThroughputPlan,
    topology: Topology,
    run: Config,
    devices: Sequence[PeerDevice],
    spans: Sequence[tuple[int, int]],
    tokens_per_s: float,
) -> str:
    """Return as text for people what limits a plan with routes.

    Peers keep their layers, and the planner's estimate is made again with links that are twice as fast, twice the
    memory, and devices that are twice as fast. No simulation is needed.

    Args:
        plan: The plan, with micro-batches that travel.
        topology: The peers, with the costs of their layers, and their links.
        run: The run's config, for which the plan was made.
        devices: Each peer's device.
        spans: Each peer's layers [first, last); (0, 0): none.
        tokens_per_s: What the plan is predicted to reach.
    """
    spans_N2, utilisation = np.array(spans), float(plan.planned_for["utilisation"])
    base = _estimate(topology, run, utilisation, spans_N2)
    used = feasibility.uses(plan, topology, problem_of(topology, run, 1, utilisation).costs)
    swarms = {
        max(LINKS, key=lambda kind: used[kind].share): _with_fast_links(topology),
        "memory": replace(topology, memory_bytes=2 * topology.memory_bytes),
        "compute": replace(topology, costs=tuple(map(_twice_as_fast, topology.costs))),
    }
    gains = {kind: _estimate(swarm, run, utilisation, spans_N2) / base for kind, swarm in swarms.items()}
    whole = ""
    if all(one.whole_bytes <= 2 * one.memory_bytes for one in devices):
        gain = sum(one.tokens_per_s for one in devices) / tokens_per_s
        whole = f"; {gain:.2g} times if each peer held the whole model, for which twice the memory would do"
    return f"{named(gains)}{whole}; not every peer holds the whole model, so micro-batches travel"


def of_whole_models(devices: Sequence[PeerDevice], holders: Sequence[int]) -> str:
    """Return as text for people what limits a swarm in which only the peers `holders` hold layers, namely all."""
    if len(holders) == len(devices):
        return "compute: each peer holds the whole model, and training waits for no link"
    then = sum(one.tokens_per_s for one in devices if one.whole_bytes <= 2 * one.memory_bytes)
    gains = {"compute": 2.0, "memory": then / sum(devices[peer].tokens_per_s for peer in holders)}
    return f"{named(gains)}; peers that cannot hold the whole model would not make the swarm faster"


def named(gains: Mapping[str, float]) -> str:
    """Return the resource that limits most, and by how much twice of each raises tokens/s, as text for people.

    Args:
        gains: By resource, the factor by which tokens/s rise with twice as much of it.
    """
    kinds = sorted(gains, key=lambda kind: -gains[kind])
    limit = kinds[0] if gains[kinds[0]] >= LIMITS_FROM else "no resource alone"
    first, *others = (f"{gains[kind]:.2g} {{}}with twice the {kind}" for kind in kinds)
    return f"{limit}: {', '.join([first.format('times the tokens/s '), *(one.format('') for one in others)])}"


def _estimate(topology: Topology, run: Config, utilisation: float, spans_N2: Ints) -> float:
    """Return the planner's estimate of tokens/s; for a large swarm, one that needs no linear programme."""
    problem = problem_of(topology, run, 1, utilisation)
    return problem.guide(spans_N2, 0.0) if len(topology) > MOST_PLAYED else problem.evaluate(spans_N2).value


def _with_fast_links(topology: Topology) -> Topology:
    """Return the topology with all rates of links doubled, and their delays as they are."""
    return replace(
        topology,
        up=2 * topology.up,
        down=2 * topology.down,
        links=topology.links._replace(bandwidth=2 * topology.bandwidth),
        sites=tuple(replace(site, up=2 * site.up, down=2 * site.down) for site in topology.sites),
    )


def _twice_as_fast(costs: KindCosts) -> KindCosts:
    """Return what layers cost a device that is twice as fast."""
    return KindCosts._make(
        one and one._replace(forward_s=one.forward_s / 2, backward_s=one.backward_s / 2) for one in costs
    )
