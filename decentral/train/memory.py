"""What a span takes of a device's memory: the bytes from which a peer's possible layers follow.

    for each parameter      20 bytes: theta, its gradient, a sealed sum of gradients, AdamW's two moments        fp32
                             4 more for each further sealed sum that `routes.sums` allows
                               more for gossip: `memory_bytes` of the algorithm's record
    of the largest fragment 16 bytes for each parameter: vectors that exist while a window is closed, merged or given
                               to a newcomer
    for each micro-batch between its forward and its backward pass
                            the tensors that autograd keeps (`activation_bytes`), and what travels

The process around it (torch, libp2p, the data) is not counted. tests/train/test_memory.py holds the figures against
what torch really keeps, and benchmarks/memory.py against what a process takes.
"""

import ctypes
from collections.abc import Sequence

from decentral.core import config
from decentral.core.algorithms import algorithm
from decentral.core.errors import UserError
from decentral.core.jobs import Fragment
from decentral.core.memory_needs import MemoryNeeds
from decentral.train import gpt
from decentral.train.inner import fragments_of

TRAINING_BYTES = 20  # for each parameter, as are the next three
SUM_BYTES = 4
SCRATCH_BYTES = 16
UNKNOWN_LAYER_BYTES = 128  # a token, and number that enters a user's own layer: a guess on the safe side
M_MMAP_THRESHOLD = -3  # glibc's name for it, in malloc.h
RETURNED_BYTES = 1 << 20


def needs(run: config.Config, cuts: Sequence[Fragment] | None = None) -> MemoryNeeds:
    """The bytes of this run's model in fp32 (bf16 keeps less). `cuts`: the fragments, if not those of the run."""
    model = run.model
    cut = tuple(cuts or fragments_of(run))
    parameter = TRAINING_BYTES + SUM_BYTES * (run.routes.slots - 1) + algorithm(run.gossip.algorithm).memory_bytes
    state = tuple(one.parameters * parameter for one in cut)
    scratch = tuple(one.parameters * SCRATCH_BYTES for one in cut)
    sequences = run.train.micro_batch if isinstance(run.train.micro_batch, int) else 1
    tokens, layers = sequences * model.context, activation_bytes(model)
    return MemoryNeeds(cut, state, scratch, tuple(tokens * sum(layers[one.first : one.last]) for one in cut))


def activation_bytes(model: config.ModelConfig) -> list[int]:
    """Bytes a token that each layer keeps from its forward pass for its backward pass, in fp32.

    A block keeps what each of its matrix products, norms, rotations and gates got: 14 vectors of its width, of which
    two are keys and values, and five of its hidden width. The head keeps its norm's input and output, logits and
    their softmax. What is sent on is kept as well.
    """
    if model.layers is not None:
        return [UNKNOWN_LAYER_BYTES * width for width in gpt.widths(model)]
    width, keys = model.d_model, model.d_model // model.n_heads * model.n_kv_heads
    block = 4 * (10 * width + 4 * keys + 5 * model.d_hidden)
    return [4 * width + 8, *([block] * model.depth), 4 * (3 * width + 3 * model.vocabulary)]


def check(found: MemoryNeeds, memory_bytes: int) -> None:
    """Raises UserError if not one fragment fits."""
    least = min(found.span_bytes(index, index + 1) for index in range(len(found.fragments)))
    if least > memory_bytes:
        advice = "give more, or lower gossip.fragment_parameters or train.micro_batch"
        raise UserError(f"--memory {memory_bytes}: the smallest part of this model takes {least} bytes; {advice}")


def give_back_what_is_freed() -> None:
    """Makes this process return freed tensors above RETURNED_BYTES on the CPU to the system at once.

    glibc raises that threshold with every tensor that is freed, up to 32 MiB, and keeps what is below: after some
    micro-batches a span had taken 1.4 times its bytes. Another C library decides for itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)
