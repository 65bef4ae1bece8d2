"""What the benchmarks of hostile peers share: the models of a simulated swarm's peers, and a line for each result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from decentral.core.ids import PeerId
from decentral.sim.gradients import Trained
from decentral.sim.swarm import SimulatedPeer, SwarmSettings
from decentral.sim.virtual_host import Training


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


def say(line: dict[str, Any], file: Path | None) -> None:
    """Prints a result as JSON, and appends it to the file."""
    print(json.dumps(line), flush=True)
    if file is not None:
        with file.open("a") as opened:
            opened.write(json.dumps(line) + "\n")
