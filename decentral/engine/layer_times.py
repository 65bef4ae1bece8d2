"""Measure what one layer of each kind (embedding, block, head with the loss) costs a device: `layer_costs`.

A peer measures a layer that it holds; for a kind that it does not hold, it builds a layer for the measurement, if the
layer fits in memory that is free. So the measured costs do not depend on the peer's span. Shapes: B sequences, T
positions, D width.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from decentral.core import config
from decentral.core.fragments import Fragment
from decentral.core.layer_work import FORWARD_PART, KindCost, KindCosts, shape_of
from decentral.engine import accelerator, memory
from decentral.engine.step import Device
from decentral.model import decoder

KIND_S = 0.25  # when the timed passes of a layer have taken this long in all, no further pass is timed
MOST_PASS_S = 0.5  # if a layer's FLOPs suggest that its two passes take longer, it is timed with fewer sequences
# After one warm-up pass, at most this many passes of a layer are timed. The fastest pass counts, since other programs
# may interrupt a pass.
PASSES = 20
LEAST_TOKEN_S = 1e-12  # a reported time per token is at least this many seconds
FILLED = 0.01  # each weight of a layer that is built only for the measurement has this value


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """A model and a device on which to measure its layers."""

    run: config.Config
    cuts: tuple[Fragment, ...]
    device: Device
    sequences: int  # number of sequences in a micro-batch of training
    flops: float  # FLOP/s of the device, throttling included
    free_bytes: int  # device memory that layers which are built only for the measurement may take
    numbers: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def cost_of(self, at: int, held: nn.Module | None) -> KindCost | None:
        """Return what layer `at` costs, measured on `held` or, if that is None, on a new layer of the same kind.

        The result is None if the layer or its passes do not fit into the device's memory.
        """
        run, sizes = self.run, memory.layer_bytes(self.run)
        flops = run.model.layer_flops[at] * run.model.context
        sequences = max(1, min(self.sequences, int(MOST_PASS_S * self.flops / flops)))
        if held is None:
            passing = sizes[at].computed + sequences * run.model.context * sizes[at].token
            if sizes[at].state + passing > self.free_bytes:
                return None
        try:
            forward_s, backward_s, kept = self._timed(at, held or self._built(at), sequences)
        except torch.OutOfMemoryError:
            accelerator.free_cache(self.device.device)
            return None
        tokens = sequences * run.model.context
        kind = self._kind(at)
        alike = run.model.depth if kind == 1 else 1
        emulated_s = self.device.emulated_s * shape_of(self.cuts)[kind] / alike / (self.sequences * run.model.context)
        times = self.device.throttle / self.device.ranks.size
        return KindCost(
            forward_s=max(LEAST_TOKEN_S, max(forward_s / tokens, emulated_s * FORWARD_PART) * times),
            backward_s=max(LEAST_TOKEN_S, max(backward_s / tokens, emulated_s * (1 - FORWARD_PART)) * times),
            activation_bytes=kept // tokens,
            state_bytes=self._state_bytes(at),
        )

    def _kind(self, at: int) -> int:
        """Return 0 for the embedding, 1 for a block and 2 for the head."""
        return 0 if at == 0 else 2 if at == self.run.model.depth + 1 else 1

    def _state_bytes(self, at: int) -> int:
        """Return the bytes of the layer's weights, gradient, optimizer state, gossip state and sums of gradients."""
        needs, parameters = memory.needs_on(self.run, self.device), decoder.parameters(self.run.model)
        layers = memory.layer_bytes(self.run)
        beside = sum(needs.state_of_parts) - sum(layer.state for layer in layers)
        return layers[at].state + beside * parameters[at] // sum(parameters)

    def _built(self, at: int) -> nn.Module:
        """Return a new layer of the same kind and shape as layer `at`, in which each weight is FILLED."""
        model, run = self.run.model, self.run
        kind = self._kind(at)
        small = model.model_copy(update={"depth": 1, "width": model.d_model, "start_from": None, "weights": None})
        layer = decoder.placed(decoder.build(small, 0, kind, kind + 1, drawn=False), run, self.device.device)[0]
        for weight in layer.to(getattr(torch, run.train.weights)).parameters():
            nn.init.constant_(weight, FILLED)
        return layer

    def _timed(self, at: int, layer: nn.Module, sequences: int) -> tuple[float, float, int]:
        """Return the seconds of a forward and of a backward pass, and the bytes that are kept between the two."""
        forward_s: list[float] = []
        backward_s: list[float] = []
        _, _, kept = self._pass(at, layer, sequences)
        while len(forward_s) < PASSES and sum(forward_s) + sum(backward_s) <= KIND_S:
            forward, backward, _ = self._pass(at, layer, sequences)
            forward_s.append(forward)
            backward_s.append(backward)
        return min(forward_s), min(backward_s), kept

    def _pass(self, at: int, layer: nn.Module, sequences: int) -> tuple[float, float, int]:
        run, device = self.run, self.device.device
        shape, kept = (sequences, run.model.context), _KeptBytes(layer)
        targets_BT = torch.randint(run.model.vocabulary, shape, generator=self.numbers).to(device)
        entering = targets_BT
        if at > 0:
            hidden_BTD = torch.randn((*shape, run.model.d_model), generator=self.numbers)
            entering = hidden_BTD.to(device, getattr(torch, run.train.weights)).requires_grad_()
        (used,) = decoder.recomputed(run, [layer], at)
        began = self._now()
        with self.device.autocast(), torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            if at == run.model.depth + 1:
                output = decoder.last_loss(run, used, entering, targets_BT)
            else:
                output = used(entering)
        forward_done = self._now()
        if output.requires_grad:  # the embedding of a model with adapters is frozen
            torch.autograd.backward([output], [torch.ones_like(output)])
        return forward_done - began, self._now() - forward_done, kept.bytes

    def _now(self) -> float:
        accelerator.wait(self.device.device)
        return time.perf_counter()


class _KeptBytes:
    """Counts the bytes of the tensors that autograd keeps for the backward pass, without the layer's own weights."""

    def __init__(self, layer: nn.Module) -> None:
        weights = list(layer.parameters())
        shapes = [one.shape for one in weights if one.dim() == 2]
        self.shapes = {*shapes, *(shape[::-1] for shape in shapes)}  # autocast keeps copies of weights in another dtype
        self.seen = {one.untyped_storage().data_ptr() for one in (*weights, *layer.buffers())}
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen and tensor.shape not in self.shapes:
            self.seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


def layer_costs(trial: LayerTrial, held: Mapping[int, nn.Module]) -> KindCosts:
    """Return the time and memory that a layer of each kind takes on this device, with throttling and emulation.

    The kinds of a user's own model (`model.layers`) are not measured, since its layers may all differ.

    Args:
        trial: The model and the device.
        held: The layers that the peer holds, by their index in the model. The measurement changes their gradients.
    """
    model = trial.run.model
    if model.layers is not None:
        return KindCosts()
    block = next((at for at in held if 0 < at <= model.depth), 1)
    embedding, inner, head = (trial.cost_of(at, held.get(at)) for at in (0, block, model.depth + 1))
    return KindCosts(embedding, inner, head)
