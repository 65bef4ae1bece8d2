"""Real gradients in virtual time: train/compute.py's Compute trains; only its seconds are the simulation's."""

from dataclasses import replace
from pathlib import Path

import torch

from decentral.core import jobs, rng
from decentral.core.ids import PeerId
from decentral.core.time_spent import TimeSpent
from decentral.sim.swarm import SimulatedPeer, SwarmSettings
from decentral.sim.virtual_host import Training
from decentral.train import compress, data
from decentral.train.compute import Compute, ComputeSetup
from decentral.train.micro_batch_names import MicroBatchNames
from decentral.train.step import Device


class Trained(Compute):
    """A Compute that steps when it is told to."""

    def take_steps(self, count: int, spent: TimeSpent) -> jobs.Stepped:
        assert count == 1, "real steps are made one by one"
        return replace(self.step(), spent=spent)

    def do(self, job: jobs.Job) -> jobs.Outcome:
        """Leaves out the seconds that this machine took: two runs of a seed must not differ by them."""
        outcome = super().do(job)
        return replace(outcome, seconds=0.0) if isinstance(outcome, jobs.Evaluated) else outcome


def real_gradients(shape: SwarmSettings, folder: Path) -> SwarmSettings:
    """Return the same swarm, with the config's model trained on its data.

    Args:
        shape: The swarm.
        folder: Of the peers' checkpoints, from which those go on that fail and come back; it has none yet.
    """
    run = shape.config
    corpus = data.load(run.data, run.model)

    def train(member: SimulatedPeer) -> Training:
        place = folder / member.peer
        place.mkdir(parents=True, exist_ok=True)
        trained = Trained(ComputeSetup(run, member.peer, corpus, compress, device, place, member.span))
        trained.resume()
        trained.numbers.names = MicroBatchNames.known(member.peer)
        trained.numbers.draw = rng.stream(run.seed, "names", member.peer, member.lives).randrange
        return trained

    device = Device(torch.device("cpu"), torch.float32)
    probe = Compute(ComputeSetup(run, PeerId("probe"), corpus, compress, device, folder))
    return replace(
        shape,
        fragments=tuple(probe.fragments),
        pace=replace(shape.pace, steps_at_once=1),
        tokens_per_step=probe.micro_batch * run.model.context * run.train.accumulate,
        gradients=train,
        donated=tuple(probe.gossip.state_layouts()),
    )
