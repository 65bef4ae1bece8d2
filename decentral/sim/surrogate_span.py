"""The fragments that a surrogate peer holds: a few numbers each, with their gossip and their work for routes."""

import numpy as np
import torch
from torch import nn

from decentral.core import config, jobs
from decentral.core.ids import PeerId
from decentral.sim.surrogate_model import DESCENT_RATE, NUMBERS, STEP_NOISE, SurrogateModel, loss_of
from decentral.sim.surrogate_stages import SurrogateStages
from decentral.train import update_rules
from decentral.train.fragment_gossip import FragmentGossip
from decentral.train.inner import Live


class SurrogateSpan:
    """Does what train/span.py does."""

    layers: tuple[int, int]
    fragments: list[jobs.Fragment]
    lives: list[Live]
    stages: SurrogateStages

    def __init__(
        self, model: SurrogateModel, peer: PeerId, chance: np.random.Generator, layers: tuple[int, int]
    ) -> None:
        self.model, self.peer, self.chance, self.cuts = model, peer, chance, model.cuts
        self.gossip = FragmentGossip([], model.config.gossip, peer, model.synthetic_codecs())
        self.fragments = []
        self.hold(*layers)

    def hold(self, first: int, last: int) -> None:
        """Holds layers [first, last): those that are here as they are, the others with their initial weights."""
        assert not self.fragments or self.stages.idle, "a span changes while no execution is pending"
        known = {one.live.fragment.index: one.live for one in self.gossip.fragments}
        self.layers = first, last
        self.fragments = [cut for cut in self.cuts if first <= cut.first and cut.last <= last]
        self.lives = [known.get(cut.index) or _live(cut, self.model.config.train) for cut in self.fragments]
        self.gossip.hold(self.lives)
        self.stages = SurrogateStages(self.model, self.peer, self.lives, self.fragments, self.chance)

    def descend(self, count: int) -> None:
        """So many steps at once: the descent and the noise of all of them."""
        keep, rate = (1 - DESCENT_RATE) ** count, self.model.config.train.learning_rate
        for live, numbers in zip(self.lives, self.stages.weights, strict=True):
            numbers *= keep
            numbers += self.chance.normal(0.0, STEP_NOISE * count**0.5, NUMBERS)
            live.tokens += count * self.model.tokens_per_step
            live.lr_sum += count * rate
            live.steps += count

    def loss(self) -> float:
        return loss_of(self.stages.weights)

    def all_state_layouts(self) -> tuple[jobs.Layout, ...]:
        """The layout of every fragment's state as a newcomer gets it, of the whole model."""
        layout = update_rules.layout_of(update_rules.donated(self.model.config.gossip), NUMBERS, self.gossip.codecs)
        return (layout,) * len(self.cuts)


def _live(fragment: jobs.Fragment, train: config.TrainConfig) -> Live:
    few = jobs.Fragment(fragment.index, 0, 1, NUMBERS)
    return Live(few, [nn.RMSNorm(NUMBERS)], torch.device("cpu"), train)  # its weights are ones
