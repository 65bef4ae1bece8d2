"""Several peers' checkpoints taken together: their average, and how far they are apart.

Peers may hold different fragments of a model; each fragment is averaged over those that hold it.
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

AT_ONCE = 8  # sequences of held-out text that are evaluated together

Weights = dict[int, Tensor]
"""The live weights [n] of each fragment that a peer holds, by the fragment's index."""


def read(folder: Path) -> Weights | None:
    """The live weights in a peer's checkpoint. Raises UserError if it is damaged."""
    found = checkpoint.read(folder)
    if found is None:
        return None
    tensors, facts = found
    return {fragment["index"]: tensors[f"{fragment['index']}.theta"].float() for fragment in facts["fragments"]}


def average(replicas: Sequence[Weights]) -> Weights:
    """The mean of each fragment over those that hold it; fragments that nobody holds are left out."""
    return {
        index: torch.stack([own[index] for own in replicas if index in own]).mean(dim=0)
        for index in sorted({index for own in replicas for index in own})
    }


def spread(replicas: Sequence[Weights]) -> float:
    """Root mean square distance of the replicas from their mean, over the root mean square of that mean."""
    apart, scale = 0.0, 0.0
    for index, mean in average(replicas).items():
        held = [own[index] for own in replicas if index in own]
        apart += sum(float(((own - mean) ** 2).sum()) for own in held) / len(held)
        scale += float((mean**2).sum())
    return float((apart / scale) ** 0.5)


def missing(run: config.Config, weights: Weights) -> list[Fragment]:
    """The fragments of the run's model that nobody holds."""
    return [fragment for fragment in fragments_of(run) if fragment.index not in weights]


def layers_with(run: config.Config, weights: Weights, frozen: bool = True) -> list[nn.Module]:
    """The run's model with these weights, on the CPU. Without `frozen`, weights that adapters stand beside are whatever
    the memory holds, and nothing is read. Raises UserError if they are another model's, or not all."""
    for fragment in missing(run, weights):
        raise UserError(f"nobody holds layers {fragment.first} to {fragment.last - 1} of the model")
    model = run.model if frozen else run.model.model_copy(update={"start_from": None, "weights": None})
    with nullcontext() if frozen else decoder.Undrawn():
        layers = decoder.build(model, run.seed, drawn=False)
    train = run.train.model_copy(update={"weights": "float32", "moments": "float32"})
    for fragment in fragments_of(run):
        if weights[fragment.index].numel() != fragment.parameters:
            raise UserError(f"layers {fragment.first} to {fragment.last - 1} are another model's")
        live = Live(fragment, layers, torch.device("cpu"), train)
        live.theta.copy_(weights[fragment.index])
    return layers


def held_out_loss(run: config.Config, weights: Weights) -> float:
    """Held-out loss of the run's model with these weights, in fp32 on the CPU. Raises UserError if data is missing."""
    batch = corpora.load(run.data, run.model).evaluation(run.train.eval_sequences)
    cpu = Device(torch.device("cpu"), torch.float32)
    return step.held_out_loss(Chain(layers_with(run, weights), run=run), batch, cpu, AT_ONCE)
