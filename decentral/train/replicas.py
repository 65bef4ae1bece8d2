"""What several peers' checkpoints are together: their average, and how far they are apart."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from decentral.core import config, jobs
from decentral.core.ids import PeerId
from decentral.train import checkpoint, data
from decentral.train.compute import Compute, Setup
from decentral.train.sections import Codecs
from decentral.train.step import Device

Weights = list[Tensor]
"""One vector per fragment."""


def read(folder: Path) -> Weights | None:
    """The live weights in a peer's checkpoint. Raises UserError if it is damaged."""
    found = checkpoint.read(folder)
    if found is None:
        return None
    tensors, facts = found
    return [tensors[f"{fragment['index']}.theta"] for fragment in facts["fragments"]]


def average(replicas: Sequence[Weights]) -> Weights:
    return [torch.stack(parts).mean(dim=0) for parts in zip(*replicas, strict=True)]


def spread(replicas: Sequence[Weights]) -> float:
    """Root mean square distance of the replicas from their mean, over the root mean square of that mean."""
    mean = average(replicas)
    apart = sum(float(((own - part) ** 2).sum()) for theta in replicas for own, part in zip(theta, mean, strict=True))
    scale = sum(float((part**2).sum()) for part in mean)
    return float((apart / len(replicas) / scale) ** 0.5)


def held_out_loss(run: config.Config, weights: Weights, codecs: Codecs) -> float:
    """Of the run's model with these weights, in fp32 on the CPU."""
    plain = run.model_copy(update={"train": run.train.model_copy(update={"micro_batch": 8})})
    device = Device(torch.device("cpu"), torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        corpus = data.load(run.data, run.model)
        compute = Compute(Setup(plain, PeerId("average"), corpus, codecs, device, Path(folder)))
        for mixed, vector in zip(compute.mixing.fragments, weights, strict=True):
            mixed.live.theta.copy_(vector)
        outcome = compute.do(jobs.Evaluate())
    assert isinstance(outcome, jobs.Evaluated)
    return outcome.loss
