"""Divide a token's computing time among a model's layers, from a device's measurements of each kind of layer.

A model has three kinds of layer: the embedding, the blocks (all equal), and the head with the loss. A peer measures
one layer of each kind (engine/layer_times.py) and publishes the measured costs in its record. `share` and
`forward_share` divide the time of a token by these costs. A kind that is not measured counts by its floating-point
operations; layers of user code (`model.layers`) count by their parameters.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

from pydantic import Field, Strict

from decentral.core.fragments import Fragment

FORWARD_PART = 1 / 3  # the forward pass takes this share of the time of a layer whose passes are not measured
LEAST_PART = 1e-6  # each kind takes at least this share of a token's time, as LP solvers drop coefficients near 0

TokenSeconds = Annotated[float, Field(ge=1e-12, le=1e4, allow_inf_nan=False)]
LayerBytes = Annotated[int, Strict(), Field(ge=0, lt=1 << 50)]
Shape = tuple[float, float, float]
"""The shares of a token's time that the embedding, all blocks together, and the head take; they sum to 1."""


class KindCost(NamedTuple):
    """The time and memory that one layer takes on a device in training, throttling included."""

    forward_s: TokenSeconds  # seconds per token
    backward_s: TokenSeconds  # seconds per token
    activation_bytes: LayerBytes  # bytes that are kept for each token between the forward and the backward pass
    state_bytes: LayerBytes  # bytes of the layer's weights, gradient, moments and gossip state

    @property
    def seconds(self) -> float:
        """Return the seconds per token of both passes."""
        return self.forward_s + self.backward_s


class KindCosts(NamedTuple):
    """The time and memory that one layer of each kind takes on a device; None: not measured."""

    embedding: KindCost | None = None
    block: KindCost | None = None
    head: KindCost | None = None


UNMEASURED = KindCosts()


@lru_cache(maxsize=4096)  # one entry for each peer of a large swarm, as each peer has its own measurements
def shape_of(cuts: tuple[Fragment, ...], costs: KindCosts = UNMEASURED) -> Shape:
    """Return the shares of a token's time that the embedding, the blocks and the head take on a device.

    If neither a block nor the head is measured, each kind's share of the time is its share of the work
    (`Fragment.work`). If a block or the head is measured, a kind that is not measured is assumed to run at the same
    FLOP/s.

    Args:
        cuts: All fragments of the model.
        costs: The device's measurements.
    """
    work = [sum(cut.work_of_kinds[kind] for cut in cuts) for kind in range(3)]
    layers = 1, cuts[-1].last - 2, 1
    known_s = {kind: cost.seconds * layers[kind] for kind, cost in enumerate(costs) if cost is not None and work[kind]}
    computing_s = sum(seconds for kind, seconds in known_s.items() if kind > 0)  # the embedding has hardly any FLOPs
    if computing_s <= 0:
        known_s, computing_s = {}, 1.0
    speed = sum(work[kind] for kind in known_s if kind > 0) / computing_s or 1.0
    seconds = [known_s.get(kind, work[kind] / speed) for kind in range(3)]
    least = LEAST_PART * sum(seconds)
    raised = [max(least, one) if work[kind] else 0.0 for kind, one in enumerate(seconds)]
    embedding, blocks, head = (one / sum(raised) for one in raised)
    return embedding, blocks, head


def token_seconds(cuts: Sequence[Fragment], costs: KindCosts) -> float:
    """Return a token's seconds through the whole model on a device that has measured a block or the head, else 0.0."""
    shape, layers = shape_of(tuple(cuts), costs), (1, cuts[-1].last - 2, 1)
    measured = [(cost.seconds * layers[kind], shape[kind]) for kind, cost in enumerate(costs) if kind and cost]
    return sum(seconds for seconds, _ in measured) / sum(part for _, part in measured) if measured else 0.0


def mean_shape(shapes: Sequence[tuple[float, Shape]]) -> Shape:
    """Return the weighted mean of shapes, given as (weight, shape) pairs, rounded to three decimals.

    Weights may be 0; if all weights are 0, all shapes count alike.
    """
    least = 1e-9 * sum(weight for weight, _ in shapes) + 1e-300
    total = sum(weight + least for weight, _ in shapes)
    embedding, _, head = (sum((weight + least) / total * one[kind] for weight, one in shapes) for kind in range(3))
    return round(embedding, 3), 1 - round(embedding, 3) - round(head, 3), round(head, 3)


@lru_cache(maxsize=4096)
def shares_of(cuts: tuple[Fragment, ...], shape: Shape) -> tuple[float, ...]:
    """Return the share of a token's time that each fragment takes; the shares sum to 1."""
    work = [sum(cut.work_of_kinds[kind] for cut in cuts) or 1.0 for kind in range(3)]
    return tuple(sum(shape[kind] * cut.work_of_kinds[kind] / work[kind] for kind in range(3)) for cut in cuts)


def share(cuts: Sequence[Fragment], first: int, last: int, costs: KindCosts = UNMEASURED) -> float:
    """Return the share, 0 to 1, of a token's time in the fragments that lie completely in layers [first, last).

    Args:
        cuts: All fragments of the model.
        first: First layer.
        last: Layer after the last one.
        costs: The device's measurements.
    """
    shares = shares_of(tuple(cuts), shape_of(tuple(cuts), costs))
    return sum(one for cut, one in zip(cuts, shares, strict=True) if first <= cut.first and cut.last <= last)


def forward_share(cuts: Sequence[Fragment], first: int, last: int, costs: KindCosts = UNMEASURED) -> float:
    """Return the share, 0 to 1, of a token's time that the forward job of a stage with layers [first, last) takes.

    If the stage includes the model's last layer, this is the stage's whole share, because the forward job of that stage
    also runs the backward pass.
    """
    if last == cuts[-1].last:
        return share(cuts, first, last, costs)
    shape = shape_of(tuple(cuts), costs)
    parts = [FORWARD_PART if cost is None else cost.forward_s / cost.seconds for cost in costs]
    forward = tuple(one * part for one, part in zip(shape, parts, strict=True))
    shares = shares_of(tuple(cuts), (forward[0], forward[1], forward[2]))
    return sum(one for cut, one in zip(cuts, shares, strict=True) if first <= cut.first and cut.last <= last)
