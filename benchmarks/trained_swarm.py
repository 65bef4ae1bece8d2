"""What benchmarks with real gradients in virtual time share: the models of a swarm's peers, the held-out loss of their
mean, and a line for each result."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decentral.core.ids import PeerId
from decentral.engine.step import held_out_loss
from decentral.sim.host import Training
from decentral.sim.real_training import Trained
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SwarmSettings


def keeping_models(settings: SwarmSettings) -> tuple[SwarmSettings, dict[PeerId, Trained]]:
    """The same swarm of real gradients, and what its peers have trained, by peer, as they come."""
    trained: dict[PeerId, Trained] = {}
    made = settings.gradients
    assert made is not None

    def kept(member: SimulatedPeer) -> Training:
        training = made(member)
        assert isinstance(training, Trained)
        trained[member.peer] = training
        return training

    return replace(settings, gradients=kept), trained


def loss_of_mean(replicas: Sequence[Trained]) -> float:
    """The held-out loss of the mean of these peers' weights, which the first of them keeps."""
    first = replicas[0]
    for number, live in enumerate(first.span.inner.lives):
        together = torch.stack([one.span.inner.lives[number].theta for one in replicas])
        live.theta.copy_(together.mean(dim=0))
    return held_out_loss(first.span.forward, first.held_out, first.setup.device, at_once=64)


def say(line: dict[str, Any], file: Path | None) -> None:
    """Prints a result as JSON, and appends it to the file."""
    print(json.dumps(line), flush=True)
    if file is not None:
        with file.open("a") as opened:
            opened.write(json.dumps(line) + "\n")
