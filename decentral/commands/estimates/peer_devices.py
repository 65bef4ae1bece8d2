"""Predict how fast devices train a run's model, from published peaks or by measuring. Start at `devices_of`."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decentral.commands.estimates.cards import Card, card
from decentral.commands.estimates.own_speed import OwnSpeed, own_speed
from decentral.commands.estimates.places import PeerGroup
from decentral.commands.estimates.traffic import NUMBER_S, Gossiper
from decentral.core import choices, config
from decentral.core.choices import OPTIMIZERS
from decentral.core.config import Config
from decentral.core.layer_work import FORWARD_PART, KindCost, KindCosts
from decentral.core.memory_needs import MemoryNeeds
from decentral.engine import memory
from decentral.engine.measure import machine_bytes
from decentral.engine.step import Device
from decentral.scheduler.throughput.layer_costs import UTILISATION

# Whole steps reach a share of a card's peak FLOP/s in this range: the measured range (docs/results/gpu.md), widened.
MEASURED_UTILISATION = (0.14, 0.5)
WITHOUT_BF16 = 0.2  # for a card that has no bf16 units, the lower end of the range is multiplied by this
MEASURED_HERE = (0.75, 1.15)  # a run on this machine is expected to reach the measured tokens/s times this range
# The same range, if the speed is computed from the FLOP/s of the small model SMALL_RUN.
FLOPS_HERE = (0.5, 2.0)
SMALL_RUN = ("model.depth=3", "model.width=256", "model.context=256", "train.micro_batch=4", "train.optimizer=adamw")
HOST_CORES = 8  # each card's host is assumed to have this many processor cores; gossip may use some of them
STEP_SEQUENCES = 16  # sequences in an optimizer step, and the most in a micro-batch, if `train.micro_batch` is auto
BRIEFLY_S = 0.5  # at least so many seconds of steps of SMALL_RUN are timed
CARD = Device(torch.device("cuda"), torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PeerDevice:
    """One peer's device, and what the run's model costs it."""

    memory_bytes: float
    tokens_per_s: float  # speed of training the whole model, if training waits for nothing
    low: float  # `tokens_per_s` times this is the low end of the device's expected speed
    high: float  # `tokens_per_s` times this is the high end of the device's expected speed
    needs: MemoryNeeds  # bytes that each fragment of the model takes on the device
    costs: KindCosts  # seconds per token and bytes that a layer of each kind takes on this device
    gossiper: Gossiper

    @property
    def whole_bytes(self) -> int:
        """The memory in bytes that a peer with the whole model needs."""
        return _whole_bytes(self.needs)


def devices_of(run: Config, groups: Sequence[PeerGroup], own_flops: float | None = None) -> list[PeerDevice]:
    """Return each group's device, from a card's published speed or, for `cpu`, from a measurement on this machine.

    Args:
        run: The run's config, with a number as `train.micro_batch`.
        groups: The peers. All peers on `cpu` are assumed to share this machine.
        own_flops: FLOP/s of a peer on this machine, from `flops_here`; None: a step of the run's own model is timed,
            which is more precise and takes longer.

    Raises:
        UserError: If a device is neither in the table nor this machine.
    """
    here = peers_here(groups)
    measured = _measured(run, here, own_flops) if here else None
    known = [None if group.is_own else card(group.device) for group in groups]
    return [one for found in known if (one := measured if found is None else _published(run, found))]


def peers_here(groups: Sequence[PeerGroup]) -> int:
    """Return the number of peers on this machine's processor."""
    return sum(group.count for group in groups if group.is_own)


def flops_here(peers: int) -> float:
    """Return the FLOP/s that each of `peers` peers on this machine's processor reaches with a small model.

    It is timed briefly. Larger models usually reach more.
    """
    run = config.load(None, SMALL_RUN)
    return _flops_of_step(run) / own_speed(run, peers, BRIEFLY_S, windows=0).step_s


def with_micro_batch(run: Config, groups: Sequence[PeerGroup]) -> Config:
    """Return the config with numbers in place of `train.micro_batch: auto`.

    The micro-batch is the largest power of two up to STEP_SEQUENCES with which each peer that can hold the whole model
    with one sequence still holds it. Unless `train.accumulate` is set, a step has STEP_SEQUENCES sequences: so a step
    costs a device the same whatever other devices there are.
    """
    if run.train.micro_batch != "auto":
        return run
    holders = [group for group in groups if _holds_whole(_with_sequences(run, 1), group, groups)]
    sequences = STEP_SEQUENCES if holders else 1
    while sequences > 1:
        found = _with_sequences(run, sequences)
        if all(_holds_whole(found, group, groups) for group in holders):
            return found
        sequences //= 2
    return _with_sequences(run, 1)


def _with_sequences(run: Config, sequences: int) -> Config:
    """Return the config with this micro-batch and, unless `train.accumulate` is set, STEP_SEQUENCES in a step."""
    found = memory.with_micro_batch(run, sequences)
    if "accumulate" in run.train.model_fields_set:
        return found
    return found.model_copy(
        update={"train": found.train.model_copy(update={"accumulate": STEP_SEQUENCES // sequences})}
    )


def _holds_whole(run: Config, group: PeerGroup, groups: Sequence[PeerGroup]) -> bool:
    """Return whether each peer of a group has memory for the whole model."""
    if group.is_own:
        return machine_bytes() / peers_here(groups) >= _whole_bytes(memory.needs(run))
    return card(group.device).memory_bytes >= _whole_bytes(memory.needs_on(run, CARD))


def _whole_bytes(needs: MemoryNeeds) -> int:
    return needs.span_bytes(0, len(needs.fragments))


def step_tokens(run: Config) -> int:
    """Return the number of tokens in a peer's optimizer step; `train.micro_batch` must be a number."""
    return int(run.train.micro_batch) * run.train.accumulate * run.model.context


def _published(run: Config, found: Card) -> PeerDevice:
    """Return the device: a card whose step reaches UTILISATION of the published peak."""
    flops = [*run.model.layer_flops[:1], sum(run.model.layer_flops[1:-1]), *run.model.layer_flops[-1:]]
    flops[1] += _optimizer_flops(run) / step_tokens(run)
    seconds = [one / (UTILISATION * found.flops) for one in flops]
    needs, tokens_per_s = memory.needs_on(run, CARD), 1 / sum(seconds)
    low, high = (one / UTILISATION for one in MEASURED_UTILISATION)
    gossiper = Gossiper(step_tokens(run) / tokens_per_s, HOST_CORES, HOST_CORES - 1)
    low *= 1.0 if found.bf16 else WITHOUT_BF16
    costs = _costs(run, memory.needs_on(memory.with_micro_batch(run, STEP_SEQUENCES), CARD), seconds)
    return PeerDevice(found.memory_bytes, tokens_per_s, low, high, needs, costs, gossiper)


def _measured(run: Config, peers: int, own_flops: float | None) -> PeerDevice:
    """Return this machine's processor, shared by `peers` peers that train on it; `own_flops` as for `devices_of`."""
    speed = OwnSpeed(_flops_of_step(run) / own_flops, NUMBER_S) if own_flops else own_speed(run, peers)
    tokens_per_s, cores = step_tokens(run) / speed.step_s, os.cpu_count() or 1
    flops = [*run.model.layer_flops[:1], sum(run.model.layer_flops[1:-1]), *run.model.layer_flops[-1:]]
    seconds = [one / sum(flops) / tokens_per_s for one in flops]
    needs, busy = memory.needs(run), min(1.0, cores / peers)
    gossiper = Gossiper(speed.step_s, busy, max(0.0, cores - peers), speed.number_s / NUMBER_S)
    low, high = FLOPS_HERE if own_flops else MEASURED_HERE
    costs = _costs(run, memory.needs(memory.with_micro_batch(run, STEP_SEQUENCES)), seconds)
    return PeerDevice(machine_bytes() / peers, tokens_per_s, low, high, needs, costs, gossiper)


def _costs(run: Config, needs: MemoryNeeds, seconds: Sequence[float]) -> KindCosts:
    """Return what one layer of each kind takes on a peer's device: seconds per token of each pass, and bytes.

    Args:
        run: The run's config.
        needs: Bytes of the fragments on the device, with a micro-batch of STEP_SEQUENCES sequences.
        seconds: Seconds per token of both passes through the embedding, all blocks together, and the head.
    """
    parameters, tokens = run.model.layer_parameters, STEP_SEQUENCES * run.model.context
    state_bytes = sum(needs.state_of_parts) / sum(parameters)
    kept = memory.activation_bytes(run.model)
    halved = sum(needs.activations) / (tokens * sum(kept))
    costs = []
    for at, alike, took_s in zip((0, 1, -1), (1, run.model.depth, 1), seconds, strict=True):
        each_s = took_s / alike
        activation_bytes = round(kept[at] * min(1.0, halved))
        state = round(state_bytes * parameters[at])
        costs.append(KindCost(each_s * FORWARD_PART, each_s * (1 - FORWARD_PART), activation_bytes, state))
    return KindCosts(costs[0], costs[1], costs[2])


def _flops_of_step(run: Config) -> float:
    """Return the FLOPs of a peer's optimizer step through the whole model."""
    return step_tokens(run) * sum(run.model.layer_flops) + _optimizer_flops(run)


def _optimizer_flops(run: Config) -> float:
    """Return the FLOPs that an optimizer step spends on the blocks' matrices."""
    code = OPTIMIZERS[run.train.optimizer].flops
    if not code or run.model.lora is not None:
        return 0.0
    flops: Callable[[int, int], float] = choices.load(code)
    return sum(flops(inputs, outputs) for inputs, outputs in run.model.block_shapes.values()) * run.model.depth
