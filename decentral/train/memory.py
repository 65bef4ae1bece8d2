"""What a span takes of a device's memory: the model that decides which layers a peer may hold.

    a parameter   20 bytes  theta, its gradient, a sealed sum of gradients, two moments of AdamW    fp32
                   4        each further sealed sum that `routes.sums` allows
                  20        gossip by `pull`: phi, baseline, momentum, residual, the closed window    fp32
                   4        two published snapshots, int8 and 4-bit, with their scales
                  24        instead of both, in a synchronous run: of three holders, the sums of two rounds     fp32
    the largest fragment, once
                  16        vectors in passing while a window is closed, merged or given to a newcomer
    a micro-batch under way
                            the tensors that autograd keeps for the backward pass (`kept`), and what travels

The process around it (torch, libp2p, the data) is not in here. tests/train/test_memory.py holds the figures against
what torch really keeps, and benchmarks/memory.py against what a process takes.
"""

import ctypes
from collections.abc import Sequence

from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.jobs import Fragment
from decentral.core.memory_needs import MemoryNeeds
from decentral.train import gpt
from decentral.train.inner import fragments_of

TRAINING_BYTES = 20
SUM_BYTES = 4
GOSSIP_BYTES = {"pull": 24, "symmetric": 12, "push_sum": 12, "allreduce": 12, "synchronous": 24}
PASSING_BYTES = 16
M_MMAP_THRESHOLD = -3  # glibc's name for it, in malloc.h
RETURNED_BYTES = 1 << 20


def needs(run: config.Config, cuts: Sequence[Fragment] | None = None) -> MemoryNeeds:
    """Of this run's model, in fp32 (bf16 keeps less). `cuts`: as if it were cut into these."""
    model = run.model
    cut = tuple(cuts or fragments_of(run))
    each_takes = TRAINING_BYTES + SUM_BYTES * (run.routes.slots - 1) + GOSSIP_BYTES[run.gossip.algorithm]
    state = [one.parameters * each_takes for one in cut]
    sequences = run.train.micro_batch if isinstance(run.train.micro_batch, int) else 1
    layers = kept(model)
    tokens = sequences * model.context
    each = [tokens * sum(layers[one.first : one.last]) for one in cut]
    passing = [one.parameters * PASSING_BYTES for one in cut]
    return MemoryNeeds(cut, tuple(state), tuple(passing), tuple(each))


def kept(model: config.ModelConfig) -> list[int]:
    """Bytes a token that each layer keeps from its forward pass for its backward pass, in fp32.

    A block keeps what each of its matrix products, norms, rotations and gates got: 14 vectors of its width, of which
    two are keys and values, and five of its hidden width. The head keeps its norm's input and output, logits and
    their softmax. What is sent on is kept as well.
    """
    if model.layers is not None:
        return [UNKNOWN_LAYER * width for width in gpt.widths(model)]
    width, keys = model.d_model, model.d_model // model.n_heads * model.n_kv_heads
    block = 4 * (10 * width + 4 * keys + 5 * model.d_hidden)
    return [4 * width + 8, *([block] * model.depth), 4 * (3 * width + 3 * model.vocabulary)]


UNKNOWN_LAYER = 128  # bytes a token and number that enters, for a user's own layer: a guess on the safe side


def check(found: MemoryNeeds, memory_bytes: int) -> None:
    """Raises UserError if not one fragment fits."""
    least = min(found.of(index, index + 1) for index in range(len(found.fragments)))
    if least > memory_bytes:
        raise UserError(
            f"--memory {memory_bytes}: the smallest part of this model takes {least} bytes; give more, or lower "
            f"gossip.fragment_parameters or train.micro_batch"
        )


def give_back_what_is_freed() -> None:
    """Of tensors above RETURNED_BYTES on the CPU, at once. A process whose memory is counted needs that.

    glibc raises that threshold with every tensor that is freed, up to 32 MiB, and keeps what is below: after some
    micro-batches a span had taken 1.4 times its bytes. Another C library decides for itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)
