"""Say in words why a synchronous plan is as it is: its step, the peers that it leaves out, and what was assumed.

Start at `reason`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from decentral.core.units import readable_number
from decentral.scheduler.sync import step_needs
from decentral.scheduler.sync.degrees import LEAST_USED, Choice, speeds_known
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.topology import GBIT, Topology

MOST_LEFT_NAMED = 3  # a reason names at most this many peers that are left out for the same cause


def reason(
    topology: Topology,
    choice: Choice,
    peers_SR: Ints,
    cost: Mapping[str, float],
    left_out: Mapping[str, str],
    utilisation: float,
) -> str:
    """Return one paragraph that explains a plan.

    Args:
        topology: The swarm.
        choice: The pair of stages and replicas, and what the other pairs cost.
        peers_SR: The plan: indices of peers; a row is a stage, a column is a pipeline.
        cost: The plan's seconds, as in SyncPlan.
        left_out: Peer id -> why it is left out.
        utilisation: Share of the topology's FLOP/s that training was assumed to reach.
    """
    sentences = [*_step(topology, choice, peers_SR, cost), *_cut(choice), *_left(left_out)]
    return " ".join([*sentences, *_model(topology, choice, utilisation)])


def left_out(topology: Topology, choice: Choice, peers_SR: Ints) -> dict[str, str]:
    """Return why each peer without a stage has none, by peer id: memory, links or speed, or no place in the pair."""
    used = np.unique(peers_SR)
    needed = step_needs.stage_bytes(choice.candidate.workload)
    memory_N, slowest = step_needs.memory_N(topology), topology.flops[used].min()
    part = next(set(part.tolist()) for part in choice.parts if used[0] in part)
    rate_N = _rates(topology, used)
    why = {}
    for peer in np.setdiff1d(np.arange(len(topology)), used):
        facts = []
        if memory_N[peer] < needed:
            facts.append(f"memory below the {needed / 1e9:.3g} GB of a stage")
        elif peer not in part:
            facts.append("no link to the plan's peers can carry a step")
        else:
            if 0 < topology.flops[peer] < slowest:
                facts.append(f"slower than the plan's devices ({slowest / 1e12:.3g} TFLOP/s)")
            if rate_N[peer] < rate_N[used].min():
                facts.append(f"slower links than the plan's ({rate_N[used].min() / GBIT:.3g} Gb/s)")
        why[topology.ids[peer]] = ", ".join(facts) or "no shorter step with more peers was found"
    return why


def _rates(topology: Topology, used: Ints) -> Floats:
    """Return the median rate of each peer's links with the peers `used`, in bytes/s; both directions are averaged."""
    seconds_NU = (1 / topology.bandwidth[:, used] + 1 / topology.bandwidth[used].T) / 2
    seconds_NU[used, np.arange(len(used))] = np.nan
    found: Floats = 1 / np.nanmedian(seconds_NU, axis=1) if len(used) > 1 else np.full(len(topology), np.inf)
    return found


def _step(topology: Topology, choice: Choice, peers_SR: Ints, cost: Mapping[str, float]) -> Iterator[str]:
    """Yield sentences about the plan's seconds."""
    if peers_SR.size == 1:
        others = {name: step for name, step in choice.steps.items() if name != "1x1"}
        best = min(others, key=lambda name: others[name], default="")
        against = f"; with more peers the best found is {best}, {others[best]:.3f} s" if best else ""
        yield f"{topology.ids[peers_SR[0, 0]]} alone takes {cost['step']:.3f} s a step{against}."
        return
    local = _inside(topology, peers_SR.T)
    step = f"; a step takes {cost['step']:.3f} s with {cost['compute']:.3f} s of computation" if "step" in cost else ""
    yield (
        f"{step_needs.named(len(peers_SR), len(peers_SR.T))} cost {cost['total']:.3f} s of communication a step: "
        f"{cost['pipeline']:.3f} s for activations and gradients between stages, and "
        f"{cost['data_parallel']:.3f} s for averaging in the slowest stage{step}."
    )
    yield (
        f"{local:.0%} of the pipelines' hops and {_inside(topology, peers_SR):.0%} of the neighbours within a stage "
        "stay inside a region."
    )


def _left(left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences about the peers that are left out, one for each cause."""
    for why in dict.fromkeys(left_out.values()):
        peers = [peer for peer, cause in left_out.items() if cause == why]
        more = f" and {len(peers) - MOST_LEFT_NAMED} more" if len(peers) > MOST_LEFT_NAMED else ""
        yield f"Left out: {', '.join(peers[:MOST_LEFT_NAMED])}{more}: {why}."


def _model(topology: Topology, choice: Choice, utilisation: float) -> Iterator[str]:
    """Yield sentences about the model, the batch and the devices that were assumed."""
    workload = choice.candidate.workload
    if speeds_known(topology):
        yield (
            f"Planned for {readable_number(step_needs.parameters(workload))} parameters, each with 4 bytes of gradient "
            f"and 16 of state, {readable_number(step_needs.tokens(workload))} tokens a step, and devices that reach "
            f"{utilisation:.0%} of their tflops."
        )
    elif choice.steps:
        yield (
            "Without the tflops of every peer only communication is compared, and at least "
            f"{LEAST_USED:.0%} of the peers that fit are used."
        )


def _cut(choice: Choice) -> Iterator[str]:
    """Yield a sentence about links that are too slow for any step, if these cut the swarm."""
    sizes = [len(part) for part in choice.parts]
    if len(sizes) > 1:
        number = "two" if len(sizes) == 2 else str(len(sizes))
        shown = ", ".join(map(str, sizes[:MOST_LEFT_NAMED])) + (", ..." if len(sizes) > MOST_LEFT_NAMED else "")
        yield (
            f"Links on which every transfer of a step takes over {step_needs.SLOWEST_TRANSFER_S:.0f} s cut the swarm "
            f"in {number}: parts of {shown} peers; the plan is for one part."
        )


def _inside(topology: Topology, rows: Sequence[Sequence[int]] | Ints) -> float:
    """Return the share, 0 to 1, of adjacent peers in `rows` that are in the same region."""
    pairs = [topology.regions[a] == topology.regions[b] for row in rows for a, b in itertools.pairwise(row)]
    return sum(pairs) / len(pairs) if pairs else 1.0
