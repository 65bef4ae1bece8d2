"""What a span takes of a device's memory: the bytes from which a peer's possible layers follow.

    for each parameter       8 bytes: theta and its gradient, in fp32; 4 with `train.weights: bfloat16`
                             8 bytes: AdamW's two moments; 2 and a bit for matrices with `train.moments: int8`;
                               4 where Muon trains it
                               more for gossip: `memory_bytes` of the algorithm's record. On a GPU they are in the
                               memory of its host, and are not counted
                             4 bytes for each sealed sum of gradients that may wait (`RoutesConfig.slots`), and 4 for
                               the sum that is being filled if the gradients are in bf16: at peers with a part of the
                               model only. A peer with all of it has such sums, and one being filled, from the first
                               micro-batch on that it computes for others
    of the largest fragment 16 bytes for each parameter: vectors that exist while a window is closed, merged or given
                               to a newcomer
                            and the larger of what a step and a backward pass take while they are computed
                            with `model.lora` all of this is about the adapters, and frozen weights have 4 bytes, or 2
    for each micro-batch between its forward and its backward pass
                            the tensors that autograd keeps (`activation_bytes`), and what travels

With `routes.overlap` and fp32 weights, for each parameter besides (engine/look_ahead.py): 4 bytes for what the last
step moved, 4 of one fragment while its step is taken, and 4 for each micro-batch between its passes, for the weights
that it was computed with.

The process around it (torch, libp2p, the data) is not counted. tests/engine/test_memory.py holds the figures against
what torch really keeps, and benchmarks/memory.py against what a process takes.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from decentral.core import config
from decentral.core.choices import ALGORITHMS, OPTIMIZERS
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.units import readable_bytes
from decentral.engine.fragment import fragments_of
from decentral.engine.optimizers import BLOCK
from decentral.engine.step import Device
from decentral.model import decoder

WEIGHT_BYTES = 4  # for each parameter of a layer that is being built, in fp32
ROTARY_BYTES = 8  # for each position and channel of a head: a block's two tables (model/decoder.py), in fp32
MEAN_COPIES = 3  # of gathered weights: their mean, the layers that take it, and what is computed with in between
SUM_BYTES = 4  # for each parameter, as is the next one
SCRATCH_BYTES = 16
ROUNDING_BYTES = 12  # for each parameter of a stretch in bf16, while it is trained: weights and gradient in fp32, noise
WIDENING_BYTES = 20  # for each parameter with moments in int8, while they are computed with in fp32
MASK_BYTES = 5  # for each pair of positions, where a window masks them: as a truth value, and as a float while computed
LOGIT_BYTES = 12  # for each logit: itself, its softmax, its gradient
PART_BYTES = 16  # where the loss is computed in parts, for each logit of a part
UNKNOWN_LAYER_BYTES = 128  # a token, and number that enters a user's own layer: a guess on the safe side
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's names for them, in malloc.h
RETURNED_BYTES = 1 << 20
KEPT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that a layer takes beside gossip."""

    state: int  # weights, gradient and optimizer state
    step: int  # while it is trained
    computed: int  # in its backward pass: a tensor's gradient, a part of the loss, activations computed again
    token: int  # a token, between the forward and the backward pass


def needs(run: config.Config, cuts: Sequence[Fragment] | None = None, gossip_apart: bool = False) -> MemoryNeeds:
    """The bytes of this run's model, its activations in fp32 (bf16 keeps less). `cuts`: the fragments, if not those of
    the run. `gossip_apart`: what gossip needs is in another memory."""
    cut, layers = tuple(cuts or fragments_of(run)), layer_bytes(run)
    gossip, shared = ALGORITHMS[run.gossip.algorithm].memory_bytes, SCRATCH_BYTES
    if gossip_apart:
        gossip, shared = 0, 0
    sums = SUM_BYTES * (run.routes.slots + (run.train.weights == "bfloat16"))
    ahead = WEIGHT_BYTES if run.routes.overlap and run.train.weights == "float32" else 0
    always, of_parts = (gossip + sums, 0) if run.synchronous else (gossip, sums + ahead)
    parameter = sum(layer.state for layer in layers) / sum(decoder.parameters(run.model))
    within = [layers[one.first : one.last] for one in cut]
    state = [sum(layer.state for layer in own) for own in within]
    if cuts is not None:  # they cut another model than the run's, whose parameters are counted alike
        state = [int(parameter * one.parameters) for one in cut]
    at_work = [max(sum(one.step for one in own), max((one.computed for one in own), default=0)) for own in within]
    return MemoryNeeds(
        fragments=cut,
        state=tuple(own + always * one.parameters for own, one in zip(state, cut, strict=True)),
        scratch=tuple((shared + ahead) * one.parameters + own for own, one in zip(at_work, cut, strict=True)),
        activations=tuple(
            _tokens(run) * sum(layer.token for layer in own) + ahead * one.parameters
            for own, one in zip(within, cut, strict=True)
        ),
        sums=tuple(of_parts * one.parameters for one in cut),
    )


def needs_on(run: config.Config, device: Device) -> MemoryNeeds:
    """Return the bytes of this run's model on a device.

    A GPU's memory holds none of what gossip needs, and a peer with the whole model needs memory for one micro-batch
    there: it ends each before it begins the next. Arithmetic in bf16 keeps half of the activations' bytes: 0.45 and
    0.51 were measured (docs/results/gpu.md).
    """
    if device.device.type != "cuda":
        return needs(run)
    found = replace(needs(run, gossip_apart=True), whole_in_flight=1)
    if device.dtype != torch.bfloat16:
        return found
    return replace(found, activations=tuple(size // 2 for size in found.activations))


def layer_bytes(run: config.Config) -> list[LayerBytes]:
    """What each layer of the run's model takes."""
    train, found, number_bytes = run.train, [], 2 if run.train.weights == "bfloat16" else 4
    chosen = OPTIMIZERS[train.optimizer]
    kept, last = activation_bytes(run.model), len(decoder.sizes(run.model)) - 1
    entering, logits = decoder.widths(run.model), _tokens(run) * run.model.vocabulary
    for number, sizes in enumerate(decoder.sizes(run.model)):
        inner = 0 < number < last
        apart = sum(sizes.matrices) if inner and chosen.stretch else 0  # what AdamW does not train
        decayed, gains = sum(sizes.matrices) + sum(sizes.larger) - apart, sum(sizes.gains)
        step, moments = chosen.scratch_bytes * max(sizes.matrices, default=0) if apart else 0, 8 * decayed
        if train.moments == "int8":
            moments, step = 2 * decayed + 8 * -(-decayed // BLOCK), max(step, WIDENING_BYTES * decayed)
        if train.weights == "bfloat16":
            step += ROUNDING_BYTES * max(apart, decayed)
        weights = number_bytes * (apart + decayed + gains)
        frozen = number_bytes * run.model.layer_parameters[number] if run.model.lora is not None else 0
        largest = max((*sizes.matrices, *sizes.larger, *sizes.gains), default=0)
        token, computed = kept[number], number_bytes * largest
        if inner and run.model.windowed:
            computed += MASK_BYTES * run.model.context**2
        if inner and train.recompute:
            token, computed = 4 * entering[number], computed + _tokens(run) * token
        if number == last and logits > decoder.LOGITS_AT_ONCE and run.model.layers is None:
            token, computed = token - LOGIT_BYTES * run.model.vocabulary, computed + PART_BYTES * decoder.LOGITS_AT_ONCE
        found.append(LayerBytes(frozen + 2 * weights + 4 * apart + moments + 8 * gains, step, computed, token))
    return found


def activation_bytes(model: config.ModelConfig) -> list[int]:
    """Bytes a token that each layer keeps from its forward pass for its backward pass, in fp32, if none is saved.

    A block keeps what each of its matrix products, norms, rotations and gates got: 14 vectors, two of them keys and
    values, and two queries, and five of its hidden width; norms of queries and keys keep two of each more. The head
    keeps its norm's input and output, logits and their softmax. What is sent on is kept as well.
    """
    if model.layers is not None:
        return [UNKNOWN_LAYER_BYTES * width for width in decoder.widths(model)]
    width, queries, keys = model.d_model, model.d_queries, model.d_keys
    normed = 2 * bool(model.options.query_norm)
    block = 4 * (8 * width + (2 + normed) * queries + (4 + normed) * keys + 5 * model.d_hidden)
    if model.lora is not None:
        block += 4 * model.lora.rank * len(model.lora.targets)
    return [4 * width + 8, *([block] * model.depth), 12 * width + LOGIT_BYTES * model.vocabulary]


def _tokens(run: config.Config) -> int:
    """Of a micro-batch."""
    return (run.train.micro_batch if isinstance(run.train.micro_batch, int) else 1) * run.model.context


def check(found: MemoryNeeds, memory_bytes: int) -> None:
    """Raises UserError if not one fragment fits."""
    least = min(found.span_bytes(index, index + 1) for index in range(len(found.fragments)))
    if least > memory_bytes:
        advice = "give more, or lower gossip.fragment_parameters or train.micro_batch"
        given = readable_bytes(memory_bytes)
        raise UserError(f"--memory {given}: the smallest part of this model takes {readable_bytes(least)}; {advice}")


def check_together(found: MemoryNeeds, peers: int, memory_bytes: int) -> None:
    """Raises UserError if so many peers, of which none may take more than this, cannot hold all layers together.

    A layer that no peer holds lets no micro-batch through: such a swarm waits, and counts nothing.
    """
    reached = found.reach(peers, memory_bytes)
    if reached == len(found.fragments):
        return
    missing, least = found.fragments[reached], found.span_bytes(reached, reached + 1)
    layers = f"layers {missing.first} to {missing.last - 1}"
    if least > memory_bytes:
        why, more = f"{layers} take {least} bytes, so no peer could hold them", ""
    else:
        why, more = f"{peers} peers with as much cannot hold all layers ({layers} are left over)", " start more peers,"
    remedy = f"give more,{more} or lower train.micro_batch"
    raise UserError(f"--memory {memory_bytes}: {why}, and nothing would train; {remedy}")


def check_machine(run: config.Config, span: tuple[int, int] | None, machine_bytes: int) -> None:
    """Raises UserError if the host's memory cannot build the built-in model's layers [first, last); None: all.

    Layers outside the span are built too, one at a time (model/decoder.py). A window's mask is made by the first step,
    on the device, and `needs` counts it. This is arithmetic: nothing is made yet.
    """
    if run.model.layers is not None:
        return  # only its own code knows
    parameters, (first, last) = run.model.layer_parameters, span or (0, run.model.depth + 2)
    blocks = min(last, run.model.depth + 1) - max(first, 1)
    tables = blocks * ROTARY_BYTES * run.model.context * run.model.d_head
    needed = WEIGHT_BYTES * max(parameters) + tables
    if needed > machine_bytes:
        size = f"{sum(parameters)} parameters, {max(parameters)} of them in one layer"
        raise UserError(f"model: {size}: to build it takes {needed} bytes, and this machine has {machine_bytes}")


def copies_that_fit(run: config.Config, wanted: int, machine_bytes: int) -> int:
    """How many copies of the built-in model, at most `wanted`, the host's memory has room for, with their mean and the
    layers that take it. Raises UserError if there is none for a single one. This is arithmetic, as `check_machine` is.
    """
    model = run.model
    whole, parameters = sum(model.layer_parameters), sum(decoder.parameters(model))
    once = ROTARY_BYTES * model.depth * model.context * model.d_head
    once += WEIGHT_BYTES * whole if model.lora is not None else 0  # frozen weights, which nobody gives
    fit = (machine_bytes - once) // (WEIGHT_BYTES * parameters) - MEAN_COPIES
    if fit < 1:
        needed = WEIGHT_BYTES * parameters * (1 + MEAN_COPIES) + once
        raise UserError(
            f"model: {whole} parameters: to gather them takes {needed} bytes, and this machine has {machine_bytes}"
        )
    return min(wanted, fit)


def give_back_what_is_freed() -> None:
    """Makes this process return freed tensors above RETURNED_BYTES on the CPU to the system at once.

    glibc raises that threshold with every tensor that is freed, up to 32 MiB, and keeps what is below: after some
    micro-batches a span had taken 1.4 times its bytes. Another C library decides for itself.
    """
    _mallopt((M_MMAP_THRESHOLD, RETURNED_BYTES))


def keep_what_is_freed() -> None:
    """Makes this process keep freed tensors of up to KEPT_BYTES on the CPU for the next step, which needs the same.

    glibc gives a thread that is not the first one a heap which it shrinks again and again: the training thread touched
    ten thousand new pages a second, and trained 3% less (0.47 M parameters). For a peer that holds the whole model.
    """
    _mallopt((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, KEPT_BYTES), (M_TRIM_THRESHOLD, 1 << 30))


def _mallopt(*options: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in options:
            mallopt(parameter, value)
