"""Train a real model in virtual time: engine/compute.py computes real gradients; their computing time is simulated."""

from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from decentral.comm.codecs import blockwise
from decentral.core import jobs, rng
from decentral.core.ids import PeerId
from decentral.core.time_spent import TimeSpent
from decentral.data import corpora
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.micro_batch_names import MicroBatchNames
from decentral.engine.micro_batch_numbers import MicroBatchNumbers
from decentral.engine.step import Device
from decentral.sim.host import Training
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SwarmSettings


class Trained(Compute):
    """The real training of a simulated peer: a `Compute` with seeded micro-batch names and without measured times."""

    def __init__(self, setup: ComputeSetup, chance: Random) -> None:
        """Prepare to train; `chance` generates the names of micro-batches."""
        super().__init__(setup)
        names, numbers = MicroBatchNames.known(setup.peer), self.numbers
        self.numbers = MicroBatchNumbers(numbers.reserved, numbers.write, names, chance.randrange)

    def take_steps(self, count: int, spent: TimeSpent) -> jobs.Stepped:
        """Take one step, since real steps cannot be merged: `count` must be 1. Report `spent` as the step's time."""
        assert count == 1, "real steps are taken one by one"
        return replace(self.step(), spent=spent)

    def do(self, job: jobs.Job) -> jobs.Outcome:
        """Run a worker's job; return its outcome, with measured durations set to 0, so that runs are reproducible."""
        outcome = super().do(job)
        return replace(outcome, seconds=0.0) if isinstance(outcome, jobs.Evaluated) else outcome


def real_gradients(shape: SwarmSettings, folder: Path) -> SwarmSettings:
    """Return a copy of `shape` in which peers train the real model on real data, in place of a surrogate.

    Args:
        shape: The settings of the swarm.
        folder: An empty folder for the peers' checkpoints, from which crashed peers restart.
    """
    run = shape.config
    corpus = corpora.load(run.data, run.model)

    def train(member: SimulatedPeer) -> Training:
        place = folder / member.peer
        place.mkdir(parents=True, exist_ok=True)
        setup = ComputeSetup(run, member.peer, corpus, blockwise, device, place, member.span)
        trained = Trained(setup, rng.stream(run.seed, "names", member.peer, member.lives))
        trained.resume()
        return trained

    device = Device(torch.device("cpu"), torch.float32)
    probe = Compute(ComputeSetup(run, PeerId("probe"), corpus, blockwise, device, folder))
    return replace(
        shape,
        fragments=tuple(probe.fragments),
        pace=replace(shape.pace, steps_at_once=1),
        tokens_per_step=probe.sequences * run.model.context * run.train.accumulate,
        gradients=train,
        donated=tuple(probe.gossip.state_layouts()),
    )
