"""Compute how much of a device's memory a range of layers takes; this limits the layers that a peer may hold.

    for each parameter
        8 bytes: theta and its gradient in fp32; 4 bytes with `train.weights: bfloat16`
        8 bytes: AdamW's two moments; about 2 bytes for matrices with `train.moments: int8`; 4 bytes with Muon
        gossip state: `state_bytes` of the algorithm's record; not counted with a GPU, where it is in host memory
        in a peer with a part of the model: 4 bytes for each of the `RoutesConfig.slots` sums of gradients that wait for
          their step, and 4 bytes for the sum that still grows if gradients are in bf16. A peer with the whole model
          computes for others only if its memory has place for these sums, with 4 bytes more in fp32 too
    for each parameter of the largest fragment
        16 bytes: vectors that exist while the fragment's update is published, merged or sent to a joining peer
    the scratch memory of an optimizer step or of a backward pass, whichever is larger
    on a CPU, in a peer with the whole model, with `train.recompute`, `train.accumulate` or `model.lora`
        HEAP_SHARES of a micro-batch's activations in front of the head: freed memory that suits no later tensor
    for each micro-batch between its forward and its backward pass
        the tensors that autograd keeps (`activation_bytes`), and the encoded output

With `model.lora` the parameters are those of the adapters, and frozen weights take 4 bytes each, or 2 in bf16.

`routes.overlap` with fp32 weights adds for each parameter (`look_ahead`): 4 bytes for the change of the last step, 4
for one fragment during its step, and 4 for each micro-batch between its passes, for its predicted weights.

The process itself (torch, libp2p, the data) is not counted. Start reading at `needs`. tests/engine/test_memory.py
compares the results with what torch allocates, benchmarks/memory.py with what a process takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from decentral.core import config
from decentral.core.choices import ALGORITHMS, OPTIMIZERS
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.units import readable_bytes, readable_number
from decentral.engine.fragment import fragments_of
from decentral.engine.heap import KEPT_BYTES, PRODUCT_BYTES, give_back_what_is_freed, keep_what_is_freed
from decentral.engine.inner import AT_ONCE_ELEMENTS
from decentral.engine.optimizers import BLOCK
from decentral.engine.step import Device
from decentral.model import decoder

WEIGHT_BYTES = 4  # an fp32 weight takes this many bytes; layers are built in fp32
ROTARY_BYTES = 8  # a block has two fp32 tables of rotary positions: this many bytes per position and channel of a head
MEAN_COPIES = 3  # averaging gathered copies of a model needs memory for 3 more: the mean, layers, a temporary result
SUM_BYTES = 4  # a sum of gradients takes this many bytes per parameter, in fp32
PUBLISHED_BYTES = 2  # of gossip state, a published snapshot with slow weights takes this many bytes per parameter
SCRATCH_BYTES = 16  # to publish, merge or send a fragment's update takes this many bytes per parameter of the fragment
# On a CPU, the heap keeps freed tensors that suit no later one: with `train.recompute`, `train.accumulate` and
# `model.lora` these shares of the activations in front of the head (measured with 0.5 to 85 M parameters: 0.06 to 0.61,
# and 0.65 to 0.73 with `model.lora`). Without these keys, gradients take their place.
HEAP_SHARES = 0.5, 0.5, 0.75
ROUNDING_BYTES = 12  # a step takes this many bytes per bf16 parameter: fp32 weight, fp32 gradient, bits for rounding
WIDENING_BYTES = 20  # with int8 moments, an optimizer step's temporary fp32 vectors take this many bytes per parameter
MASK_BYTES = 5  # windowed attention takes this many bytes per pair of positions: a boolean and a float mask
LOGIT_BYTES = 12  # a logit takes this many bytes: the logit, its softmax and its gradient, all in fp32
PART_BYTES = 16  # if the loss is computed in parts of LOGITS_AT_ONCE logits, each of these logits takes this
# A user's layer is assumed to keep this many bytes per token and input channel. The value is high, because the sizes of
# the layer's tensors are unknown.
UNKNOWN_LAYER_BYTES = 128


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """The bytes of memory that a layer takes for each purpose, without gossip state."""

    state: int  # weights, gradient and optimizer state
    step: int  # temporary tensors of the optimizer step
    computed: int  # temporary tensors of the backward pass: largest gradient, logits, recomputed activations
    token: int  # activations kept for each token between the forward and the backward pass


def needs(run: config.Config, cuts: Sequence[Fragment] | None = None, gossip_apart: bool = False) -> MemoryNeeds:
    """Return the bytes that each fragment of the run's model takes, with activations in fp32 (bf16 keeps less).

    Args:
        run: The run's config.
        cuts: Fragments of another model, whose bytes are estimated from the run's mean bytes per parameter; None: the
            run's own fragments.
        gossip_apart: True: do not count gossip state, because it is in host memory if the device is a GPU.
    """
    cut, layers = tuple(cuts or fragments_of(run)), layer_bytes(run)
    algorithm, shared = ALGORITHMS[run.gossip.algorithm], 0 if gossip_apart else SCRATCH_BYTES
    full_merges = OPTIMIZERS[run.train.optimizer].takes_all
    gossip = [0 if gossip_apart else algorithm.state_bytes(one.parameters, full_merges) for one in cut]
    features = run.model.vocabulary * (run.model.d_model - run.model.d_written)  # the table of `TokenFeatures`
    sums = SUM_BYTES * (run.routes.slots + (run.train.weights == "bfloat16"))
    ahead = WEIGHT_BYTES if run.routes.overlap and run.train.weights == "float32" else 0
    always, of_parts = (sums, 0) if run.synchronous else (0, sums + ahead)
    parameter = sum(layer.state for layer in layers) / sum(decoder.parameters(run.model))
    all_sums = SUM_BYTES * (run.routes.slots + 1) * sum(one.parameters for one in cut)
    within = [layers[one.first : one.last] for one in cut]
    state = [sum(layer.state for layer in own) for own in within]
    if cuts is not None:
        state = [int(parameter * one.parameters) for one in cut]
    at_work = [max(sum(one.step for one in own), max((one.computed for one in own), default=0)) for own in within]
    return MemoryNeeds(
        fragments=cut,
        state=tuple(own + more + always * one.parameters for own, more, one in zip(state, gossip, cut, strict=True)),
        scratch=tuple(
            features + (shared + ahead) * one.parameters + own for own, one in zip(at_work, cut, strict=True)
        ),
        activations=tuple(
            _tokens(run) * sum(layer.token for layer in own) + ahead * one.parameters
            for own, one in zip(within, cut, strict=True)
        ),
        sums_for_others=0 if run.synchronous else all_sums,
        kept=_kept_bytes(run),
        sums=tuple(of_parts * one.parameters for one in cut),
    )


def needs_on(run: config.Config, device: Device, divided: bool = False) -> MemoryNeeds:
    """Return the bytes that each fragment of the run's model takes on a device.

    If the device's island shards, or `divided` is True, these are the bytes on one rank. On a GPU, gossip state is not
    counted, because it is in host memory, and the allocator gives the memory of freed activations to gradients: a
    backward pass takes the larger of the two, not their sum. With bf16 arithmetic, activations count half: measurements
    gave 0.45 and 0.51 of their fp32 bytes (docs/results/gpu.md).
    """
    divided = divided or device.ranks.sharded
    if device.device.type == "cpu":
        found = needs(run)
    else:
        found = replace(needs(run, gossip_apart=True), kept=0)
        if run.train.accumulate == 1:
            found = replace(found, late_gradients=tuple(_number_bytes(run) * one.parameters for one in found.fragments))
        if device.dtype == torch.bfloat16:
            found = replace(found, activations=tuple(size // 2 for size in found.activations))
    return part_of(found, run, device.ranks.size, gossip_apart=device.device.type != "cpu") if divided else found


def with_micro_batch(run: config.Config, sequences: int) -> config.Config:
    """Return a copy of a config with this number of sequences in a micro-batch."""
    return run.model_copy(update={"train": run.train.model_copy(update={"micro_batch": sequences})})


def most_sequences(run: config.Config, device: Device, begin: int, end: int, memory_bytes: float, largest: int) -> int:
    """Return the most sequences of a micro-batch that fit into memory: a power of two, at least 1, at most `largest`.

    Layers are claimed with micro-batches of one sequence. A peer with a part of the model uses larger ones only if
    `preferred_in_flight` of them fit, since its device would wait for links with fewer.

    Args:
        run: The run's config, whose `train.micro_batch` does not count.
        device: The device.
        begin: The first fragment that the peer holds.
        end: The fragment after the last one.
        memory_bytes: The memory for the model, bytes.
        largest: A power of two.
    """
    sizes = (largest >> halvings for halvings in range(largest.bit_length()))
    needed = ((size, needs_on(with_micro_batch(run, size), device)) for size in sizes)

    def fits(needs: MemoryNeeds) -> bool:
        return needs.span_bytes(begin, end, needs.preferred_in_flight(end - begin)) <= memory_bytes

    return next((size for size, found in needed if fits(found)), 1)


def part_of(whole: MemoryNeeds, run: config.Config, ranks: int, gossip_apart: bool = False) -> MemoryNeeds:
    """Return the bytes that each fragment takes on rank 0 of an island whose ranks divide the model equally.

    Each rank holds an equal part of the state. Rank 0's part of the gossip state is first the published snapshots,
    which it has whole, so with many ranks it has more than the others. `whole` does not count gossip state if
    `gossip_apart` is True. For one fragment at a time, ranks also hold complete vectors: those of gossip, and the
    weights and gradients of the layer that computes, of the next layer, and of the layer whose gradients are being
    added up.
    """
    layers = [3 * 2 * _number_bytes(run) * one.parameters for one in whole.fragments]
    algorithm, full_merges = ALGORITHMS[run.gossip.algorithm], OPTIMIZERS[run.train.optimizer].takes_all
    gossip = [0 if gossip_apart else algorithm.state_bytes(one.parameters, full_merges) for one in whole.fragments]
    snapshots = [0 if gossip_apart else PUBLISHED_BYTES * one.parameters for one in whole.fragments]
    return replace(
        whole,
        state=tuple(
            -(-(size - vectors) // ranks) + max(published, -(-vectors // ranks))
            for size, vectors, published in zip(whole.state, gossip, snapshots, strict=True)
        ),
        scratch=tuple(size + more for size, more in zip(whole.scratch, layers, strict=True)),
        late_gradients=(),
        kept=0,
    )


def layer_bytes(run: config.Config) -> list[LayerBytes]:
    """Return the bytes that each layer of the run's model takes, in the order of layers."""
    train, found, number_bytes = run.train, [], _number_bytes(run)
    chosen = OPTIMIZERS[train.optimizer]
    kept, last = activation_bytes(run.model), len(decoder.sizes(run.model)) - 1
    entering, logits = decoder.widths(run.model), _tokens(run) * run.model.vocabulary
    for number, sizes in enumerate(decoder.sizes(run.model)):
        inner = 0 < number < last
        stretched = sum(sizes.matrices) if inner and chosen.stretch else 0  # trained by `chosen`; all others by AdamW
        decayed, gains = sum(sizes.matrices) + sum(sizes.larger) - stretched, sum(sizes.gains)
        step, moments = chosen.scratch_bytes * max(sizes.matrices, default=0) if stretched else 0, 8 * decayed
        if train.moments == "int8":
            moments, step = 2 * decayed + 8 * -(-decayed // BLOCK), max(step, WIDENING_BYTES * decayed)
        if train.weights == "bfloat16":
            step += ROUNDING_BYTES * max(stretched, decayed)
        weights = number_bytes * (stretched + decayed + gains)
        frozen = number_bytes * run.model.layer_parameters[number] if run.model.lora is not None else 0
        largest = max((*sizes.matrices, *sizes.larger, *sizes.gains), default=0)
        token, computed = kept[number], number_bytes * largest
        if inner and run.model.windowed:
            computed += MASK_BYTES * run.model.context**2
        if inner and train.recompute:
            input_width = run.model.d_model if run.model.layers is None else entering[number]
            token, computed = 4 * input_width, computed + _tokens(run) * token
        if number == last and logits > decoder.LOGITS_AT_ONCE and run.model.layers is None:
            token, computed = token - LOGIT_BYTES * run.model.vocabulary, computed + PART_BYTES * decoder.LOGITS_AT_ONCE
        found.append(LayerBytes(frozen + 2 * weights + 4 * stretched + moments + 8 * gains, step, computed, token))
    return found


def _kept_bytes(run: config.Config) -> int:
    """Return the bytes of freed tensors that a process with the whole model keeps, if its device is a CPU."""
    reasons = run.train.recompute, run.train.accumulate > 1, run.model.lora is not None
    share = sum(share for share, applies in zip(HEAP_SHARES, reasons, strict=True) if applies)
    return int(share * _tokens(run) * sum(activation_bytes(run.model)[:-1]))


def activation_bytes(model: config.ModelConfig) -> list[int]:
    """Return the bytes per token that each layer keeps for its backward pass, in fp32, without `train.recompute`.

    A block keeps the inputs of its matrix products, norms, rotations and gates: 8 vectors of the model's width, 2 of
    the queries' width, 4 of the keys' width, and 5 of the feed-forward's width. If queries and keys are normalised, it
    keeps 2 more vectors of the queries' and of the keys' width. The head keeps its norm's input and output, the logits
    and their softmax. The layer's output is included.
    """
    if model.layers is not None:
        return [UNKNOWN_LAYER_BYTES * width for width in decoder.widths(model)]
    width, queries, keys = model.d_model, model.d_queries, model.d_keys
    normed = 2 * bool(model.options.query_norm)
    block = 4 * (8 * width + (2 + normed) * queries + (4 + normed) * keys + 5 * model.d_hidden)
    if model.lora is not None:
        block += 4 * model.lora.rank * len(model.lora.targets)
    return [4 * width + 8, *([block] * model.depth), 12 * width + LOGIT_BYTES * model.vocabulary]


def _number_bytes(run: config.Config) -> int:
    """Return the bytes of one weight, or of its gradient, as `train.weights` says."""
    return 2 if run.train.weights == "bfloat16" else 4


def _tokens(run: config.Config) -> int:
    """Return the number of tokens in a micro-batch, or in one sequence if `train.micro_batch` is auto."""
    return (run.train.micro_batch if isinstance(run.train.micro_batch, int) else 1) * run.model.context


def check(found: MemoryNeeds, memory_bytes: int) -> None:
    """Raise UserError if no fragment fits into the memory.

    Args:
        found: The bytes that each fragment of the run takes.
        memory_bytes: The device's memory in bytes. The error text refers to it as --memory.
    """
    least = min(found.span_bytes(index, index + 1) for index in range(len(found.fragments)))
    if least > memory_bytes:
        advice = "give more memory, or lower gossip.fragment_parameters or train.micro_batch"
        given = readable_bytes(memory_bytes)
        raise UserError(f"--memory {given}: the smallest part of this model takes {readable_bytes(least)}; {advice}")


def check_together(found: MemoryNeeds, peers: int, memory_bytes: int) -> None:
    """Raise UserError if `peers` peers with `memory_bytes` bytes each cannot hold all layers together.

    If a layer has no holder, no micro-batch can pass through the model, and nothing is trained.
    """
    reached = found.reach(peers, memory_bytes)
    if reached == len(found.fragments):
        return
    missing, least = found.fragments[reached], found.span_bytes(reached, reached + 1)
    layers = f"layers {missing.first} to {missing.last - 1}"
    if least > memory_bytes:
        why, more = f"{layers} take {least} bytes, more than any peer has", ""
    else:
        why, more = f"{peers} peers with this memory cannot hold {layers}", " start more peers,"
    remedy = f"give more memory,{more} or lower train.micro_batch"
    raise UserError(f"--memory {memory_bytes}: {why}, so nothing can be trained; {remedy}")


def check_first(found: MemoryNeeds, memory_bytes: int) -> None:
    """Raise UserError if a peer that begins a run has too little memory for the largest part of the model.

    Such a peer could hold only small layers, such as the embedding, and train nothing. The check is not for peers with
    --memory, whose users want them to hold a part.

    Args:
        found: The bytes that each fragment of the run takes.
        memory_bytes: The device's memory in bytes.
    """
    largest = max(found.span_bytes(index, index + 1) for index in range(len(found.fragments)))
    if largest > memory_bytes:
        size = readable_number(sum(one.parameters for one in found.fragments))
        whole, part = readable_bytes(found.span_bytes(0, len(found.fragments))), readable_bytes(largest)
        has = f"this machine has {readable_bytes(memory_bytes)} for them"
        remedy = "use a smaller model, or a machine with more memory; with --memory a peer begins with a smaller part"
        raise UserError(f"model: {size} parameters take {whole}, and their largest part {part}; {has}; {remedy}")


def check_machine(run: config.Config, span: tuple[int, int] | None, machine_bytes: int) -> None:
    """Raise UserError if the host has too little memory to build the built-in model, before any of it is allocated.

    The estimate counts the span's tables of rotary positions, and the largest layer in fp32, since layers outside the
    span are built too, one at a time (`decoder.build`).

    Args:
        run: The run's config; a user's own model (`model.layers`) is not checked.
        span: Layers [first, last), (0, 0) if no layers are chosen yet; None: all.
        machine_bytes: The host's memory in bytes.
    """
    if run.model.layers is not None:
        return
    parameters, (first, last) = run.model.layer_parameters, span or (0, run.model.depth + 2)
    blocks = max(0, min(last, run.model.depth + 1) - max(first, 1))
    tables = blocks * ROTARY_BYTES * run.model.context * run.model.d_head
    needed = WEIGHT_BYTES * max(parameters) + tables
    if needed > machine_bytes:
        size = f"{readable_number(sum(parameters))} parameters, {readable_number(max(parameters))} of them in one layer"
        has = f"takes {readable_bytes(needed)}; this machine has {readable_bytes(machine_bytes)}"
        raise UserError(f"model: building {size}, {has}; use a smaller model, or a machine with more memory")


def copies_that_fit(run: config.Config, wanted: int, machine_bytes: int) -> int:
    """Return how many copies of the model's weights fit into the host's memory while the copies are averaged.

    The function only computes the number; it allocates no copy.

    Args:
        run: The run's config, with the built-in model.
        wanted: Number of copies that the caller can use; the result is at most this.
        machine_bytes: The host's memory in bytes.

    Raises:
        UserError: If not even one copy fits.
    """
    model = run.model
    whole, parameters = sum(model.layer_parameters), sum(decoder.parameters(model))
    once = ROTARY_BYTES * model.depth * model.context * model.d_head
    once += WEIGHT_BYTES * whole if model.lora is not None else 0  # LoRA also needs the frozen, pretrained weights
    fit = (machine_bytes - once) // (WEIGHT_BYTES * parameters) - MEAN_COPIES
    if fit < 1:
        needed = WEIGHT_BYTES * parameters * (1 + MEAN_COPIES) + once
        raise UserError(
            f"model: gathering {whole} parameters takes {needed} bytes, and this machine has {machine_bytes}; "
            "use a machine with more memory"
        )
    return min(wanted, fit)


def choose_what_is_kept(run: config.Config, whole: bool, ranks: int = 1) -> None:
    """Keep or return freed CPU tensors, whichever suits the run.

    New pages for the gradients cost 0.2 s in each step of 85 M parameters: 15% of a step with AdamW, 5% with Muon. A
    peer that trains a large model with Muon pays that to free 4 bytes a parameter between steps.

    Args:
        run: The run's config.
        whole: Whether this process has the whole model.
        ranks: The number of ranks that divide each tensor.
    """
    large = sum(decoder.parameters(run.model)) > AT_ONCE_ELEMENTS
    if not whole:
        give_back_what_is_freed(ranks)
    else:
        keep_what_is_freed(PRODUCT_BYTES if large and OPTIMIZERS[run.train.optimizer].frees_gradients else KEPT_BYTES)
