"""Read the weights in peers' checkpoints, average them, and measure their spread and the loss of their average.

Peers may hold different fragments (ranges of layers) of a model; a fragment is averaged over the peers that hold it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment
from decentral.data import corpora
from decentral.engine import checkpoint, step
from decentral.engine.fragment import Live, fragments_of
from decentral.engine.step import Chain, Device
from decentral.model import decoder
from decentral.model.undrawn import Undrawn

AT_ONCE = 8

Weights = dict[int, Tensor]
"""A peer's weights, by fragment index: a vector (n,) of all parameters of the fragment."""


def read(folder: Path) -> Weights | None:
    """Return the weights in the checkpoint of a peer's state folder, in fp32; None if there is no checkpoint.

    Raises:
        UserError: If the checkpoint is damaged.
    """
    found = checkpoint.read(folder)
    if found is None:
        return None
    tensors, facts = found
    return {fragment["index"]: tensors[f"{fragment['index']}.theta"].float() for fragment in facts["fragments"]}


def average(replicas: Sequence[Weights]) -> Weights:
    """Return the mean of each fragment over the peers that hold it; fragments without a holder are left out."""
    return {
        index: torch.stack([own[index] for own in replicas if index in own]).mean(dim=0)
        for index in sorted({index for own in replicas for index in own})
    }


def spread(replicas: Sequence[Weights]) -> float:
    """Return the root mean square distance of replicas from their mean, relative to the mean's root mean square."""
    variance, scale = 0.0, 0.0
    for index, mean in average(replicas).items():
        held = [own[index] for own in replicas if index in own]
        variance += sum(float(((own - mean) ** 2).sum()) for own in held) / len(held)
        scale += float((mean**2).sum())
    return float((variance / scale) ** 0.5)


def missing(run: config.Config, weights: Weights) -> list[Fragment]:
    """Return the fragments of the run's model that are not in `weights`."""
    return [fragment for fragment in fragments_of(run) if fragment.index not in weights]


def layers_with(run: config.Config, weights: Weights, frozen: bool = True) -> list[nn.Module]:
    """Return the layers of the run's model with these weights, on the CPU.

    Args:
        run: The run's config.
        weights: The weights of every fragment.
        frozen: True: read the frozen weights that belong to the adapters. False: leave them uninitialised.

    Raises:
        UserError: If a fragment is missing, or its number of parameters is not the model's.
    """
    for fragment in missing(run, weights):
        names = f"layers {fragment.first} to {fragment.last - 1}"
        raise UserError(f"no peer holds {names} of the model; add the weights of a peer that holds them")
    model = run.model if frozen else run.model.model_copy(update={"start_from": None, "weights": None})
    with nullcontext() if frozen else Undrawn():
        layers = decoder.build(model, run.seed, drawn=False)
    train = run.train.model_copy(update={"weights": "float32", "moments": "float32"})
    for fragment in fragments_of(run):
        if weights[fragment.index].numel() != fragment.parameters:
            names = f"layers {fragment.first} to {fragment.last - 1}"
            came = weights[fragment.index].numel()
            raise UserError(f"the weights of {names} have {came} parameters; this run's have {fragment.parameters}")
        live = Live(fragment, layers, torch.device("cpu"), train)
        live.theta.copy_(weights[fragment.index])
    return layers


def held_out_loss(run: config.Config, weights: Weights) -> float:
    """Return the run's held-out loss with these weights, in nats per token, computed in fp32 on the CPU.

    Raises:
        UserError: If the data or a fragment is missing.
    """
    batch = corpora.load(run.data, run.model).evaluation(run.eval_sequences)
    cpu = Device(torch.device("cpu"), torch.float32)
    return step.held_out_loss(Chain(layers_with(run, weights), run=run), batch, cpu, AT_ONCE)
