"""Divide a model over the ranks of an island, with torch's FSDP2 (`fully_shard`) or tensor parallelism.

Each rank has a part of each parameter, gradient and optimizer state (ZeRO stage 3: Rajbhandari et al., arXiv
1910.02054). Start reading at `build`, which all ranks call. Gossip and checkpoints ask `ShardedLive`, an implementation
of `Live`, for whole vectors of one fragment at a time, which engine/shards.py gathers.

FSDP2 gathers one layer's weights before its passes, and gives each rank its part of the mean gradient after them. With
tensor parallelism (Megatron-LM: Shoeybi et al., arXiv 1909.08053; torch's DTensor), each rank computes with some of the
heads and some of the feed-forward's channels. All ranks compute the same micro-batch, and sum over the ranks twice in
each block and pass. The embedding is divided by channels, the head by tokens of the vocabulary. Each rank has the gains
of all norms.

AdamW works on parts as on whole vectors. Muon orthogonalises whole matrices: `ShardedMuon` gathers each matrix on one
rank for that.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from decentral.core import choices, config
from decentral.core.fragments import Fragment
from decentral.core.rank_place import Split
from decentral.engine import accelerator
from decentral.engine.fragment import Arrive, CopyMemory, Live, fragments_of
from decentral.engine.inner import Inner
from decentral.engine.muon import MOMENTUM, Muon, muon_step, scratch
from decentral.engine.optimizers import Operands, OptimizerState, round_stochastically, views
from decentral.engine.shards import Cut, Division, MatrixExchange, Order, Shards, Slot
from decentral.engine.step import BuiltReplica, Chain, LossModule, ModelForward
from decentral.model import decoder

THETA = "theta"
SLOTS = {THETA: Slot.THETA, "exp_avg": Slot.FIRST, "exp_avg_sq": Slot.SECOND}  # by name of the tensor


@runtime_checkable
class Orders(Protocol):
    """Interface by which rank 0 tells the training threads of the other ranks what to do; `Island` implements it."""

    rank: int
    size: int
    split: Split
    shards: Shards

    def tell(self, order: Order, fragment: int, what: int) -> None:
        """Broadcast an order about a fragment; `what` is the index of a tensor."""

    def take(self, lives: Sequence[Live], forward: ModelForward) -> None:
        """Set the fragments and the model that later orders are about."""


class ShardedLive(Live):
    """This rank's part of a fragment's weights in training. The memory of weights and gradients belongs to torch.

    Gossip and checkpoints call its methods on rank 0 only, which then orders the other ranks to do the same. `theta` is
    empty except during an optimizer step, when it is a copy of this rank's part of the weights.
    """

    def __init__(
        self,
        fragment: Fragment,
        layers: Sequence[nn.Module],
        device: torch.device,
        train: config.TrainConfig,
        ranks: Orders,
    ) -> None:
        """Take the fragment's parameters from `layers`, all layers of the model, already divided over the ranks."""
        self.ranks = ranks
        super().__init__(fragment, layers, device, train)

    def _placed(
        self, groups: Sequence[Sequence[nn.Parameter]], device: torch.device, drawn: bool
    ) -> tuple[Tensor, OptimizerState]:
        self.cuts = cuts = [_cut(one) for one in self._parameters]
        blocks, ranks = len(groups[0]), self.ranks.size
        self.ranks.shards.divisions.append((Division(tuple(cuts), ranks), Division(tuple(cuts[blocks:]), ranks)))
        parts = self._parts()
        others = [parts[blocks : blocks + len(groups[1])], parts[blocks + len(groups[1]) :]]
        state = self._state([one.shape for one in parts[:blocks]], others, device)
        if blocks:
            sharded = choices.load(choices.OPTIMIZERS[self.train.optimizer].sharded)
            exchange = MatrixExchange(cuts[:blocks], self.ranks.rank, ranks)
            state.stretches[0] = sharded(state.stretches[0], exchange)  # the blocks' matrices come first
        return torch.empty(0, dtype=getattr(torch, self.train.weights), device=device), state

    def _parts(self) -> list[Tensor]:
        """Return this rank's part of each parameter, as a tensor that shares the parameter's memory."""
        return [_part(parameter.detach()) for parameter in self._parameters]

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of each parameter's gradient, in the order of theta."""
        pairs = zip(self._parameters, self._parts(), strict=True)
        return [torch.zeros_like(part) if one.grad is None else _part(one.grad) for one, part in pairs]

    def begin_step(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Set theta to this rank's part of the weights, and return its part of the gradient as one vector."""
        self.theta = torch.cat([one.flatten() for one in self._parts()])
        return [torch.cat([one.flatten() for one in gradients])]

    def end_step(self) -> None:
        """Copy theta to the weights, and free it."""
        self._set(self.theta)
        self.theta = self.theta.new_empty(0)

    def mark_changed(self, *names: str) -> None:
        """Do nothing: no rank has a copy of another rank's part."""

    def copied(self, room: CopyMemory) -> dict[str, Arrive]:
        """Copy theta and optimizer state to host memory on each rank, between two steps.

        Returns:
            By name, the function that gathers a whole vector in host memory.
        """
        for place in range(len(self.tensors())):
            self._everywhere(Order.LIFT, place)
        return {name: partial(self._gathered, name) for name in self.tensors()}

    def _gathered(self, name: str) -> Tensor:
        return self.ranks.shards.gather(self.fragment.index, SLOTS[name]).to(self.tensors()[name].dtype)

    def shapes(self) -> dict[str, Tensor]:
        """Return the tensors that `copied` copies, on the meta device."""
        return {
            name: torch.empty(self._division(name).elements, dtype=tensor.dtype, device="meta")
            for name, tensor in self.tensors().items()
        }

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Give all ranks their parts of theta and optimizer state, by name.

        Raises:
            ValueError: If a vector has another number of elements than this fragment's.
        """
        names = list(self.tensors())
        for name, value in values.items():
            if value.numel() != self._division(name).elements:
                raise ValueError(f"{name} has {value.numel()} elements; expected {self._division(name).elements}")
            self.ranks.shards.scatter(self.fragment.index, SLOTS[name], value.cpu().float())
            self._everywhere(Order.PUT, names.index(name))

    def copy_out(self, buffer: Callable[[], Tensor]) -> Arrive:
        """Take a `snapshot`, and return a function that returns an empty vector: the fragment's owner gathers theta."""
        self.snapshot()
        return lambda: torch.empty(0)

    def snapshot(self) -> None:
        """Copy theta to `Slot.SNAPSHOT` on each rank, between two steps."""
        self._everywhere(Order.LIFT, -1)

    def copy_in(self, vector: Tensor) -> Tensor:
        """Return the empty vector: the fragment's owner has given each rank its part of the correction."""
        return vector

    def add(self, correction: Tensor) -> None:
        """Add to theta, on each rank, the part of a correction that the fragment's owner has given it."""
        self._everywhere(Order.ADD, 0)

    def _everywhere(self, order: Order, what: int) -> None:
        self.ranks.tell(order, self.fragment.index, what)
        self.obey(order, what)

    def obey(self, order: Order, what: int) -> None:
        """Carry out an order on this rank's parts.

        Args:
            order: LIFT, PUT or ADD.
            what: With LIFT and PUT, the index of one of `tensors`; with LIFT, -1 copies theta to `Slot.SNAPSHOT`.
        """
        host, name = self.ranks.shards.host, list(self.tensors())[max(0, what)]
        if order is Order.ADD:
            part = host.take(self.fragment.index, Slot.CORRECTION).to(self.theta.device)
            chance = self.chance("add")
            for own, piece in self._pieces(part):
                round_stochastically(own.float() + piece, own, chance)
        elif order is Order.LIFT:
            slot = Slot.SNAPSHOT if what < 0 else SLOTS[name]
            host.put(self.fragment.index, slot, self._copied(name).float().cpu())
        elif order is Order.PUT:
            self._overwrite(name, host.take(self.fragment.index, SLOTS[name]))

    def _copied(self, name: str) -> Tensor:
        if name == THETA:
            return torch.cat([one.flatten() for one in self._parts()])
        return self.tensors()[name].clone()

    def _overwrite(self, name: str, value: Tensor) -> None:
        if name == THETA:
            self._set(value)
        else:
            self.tensors()[name].copy_(value)

    def _set(self, vector: Tensor) -> None:
        for own, piece in self._pieces(vector):
            own.copy_(piece)

    def _pieces(self, vector: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = self._parts()
        return list(zip(parts, views(vector, [one.shape for one in parts]), strict=True))

    def _division(self, name: str) -> Division:
        return self.ranks.shards.division(self.fragment.index, SLOTS[name])


def _part(tensor: Tensor) -> Tensor:
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def _cut(parameter: nn.Parameter) -> Cut:
    placement = parameter.placements[0] if isinstance(parameter, DTensor) else None
    return Cut(parameter.shape, placement.dim if isinstance(placement, Shard) else None)


@dataclass(frozen=True, slots=True)
class ShardedMuon:
    """Muon on parts of matrices; it implements `StretchOptimizer`. Each matrix is gathered by one rank, its owner."""

    muon: Muon  # has this rank's parts of the momenta
    exchange: MatrixExchange

    @property
    def begin(self) -> int:
        """The index in this rank's part of theta at which the parameter range begins."""
        return self.muon.begin

    @property
    def end(self) -> int:
        """The index in this rank's part of theta after the parameter range's last element."""
        return self.muon.end

    @property
    def kind(self) -> Hashable:
        """A unique key, since one call of `step` can train only one parameter range."""
        return id(self)

    def operands(self, theta: Tensor, gradients: Sequence[Tensor]) -> Operands:
        """Return this rank's parts of weights, gradients and momenta."""
        return self.muon.operands(theta, gradients)

    def step(self, operands: Operands, steps: int, rate: float, void: Tensor) -> None:
        """Take a Muon step, unless `void`, together with all other ranks.

        Each rank changes its parts of momenta and weights. Only the orthogonalisation needs whole matrices: `muon_step`
        with zero weights, and with momenta that are the gradients, turns the weights into the update.
        """
        if void:
            return
        torch._foreach_lerp_(operands.first, operands.gradients, 1 - MOMENTUM)
        wholes = self.exchange.whole(torch._foreach_lerp(operands.gradients, operands.first, MOMENTUM))
        updates = [torch.zeros_like(one) for one in wholes]
        if wholes:
            muon_step(updates, wholes, wholes, rate, 0.0)
            scratch.free()
        del wholes  # they are momenta no longer, and the exchange takes memory
        torch._foreach_mul_(operands.weights, 1 - rate * self.muon.train.weight_decay)
        torch._foreach_add_(operands.weights, self.exchange.parts(updates, operands.weights))


class ShardedInner(Inner):
    """The inner optimizer of a rank, which steps its parts of one fragment at a time."""

    @property
    def at_once(self) -> bool:
        """False: fragments step one after the other, since each step needs a copy of its fragment's weights."""
        return False

    def __init__(self, lives: Sequence[ShardedLive], train: config.TrainConfig, rank: int) -> None:
        """Set up the optimizer of this rank's parts.

        A parameter that is whole on all ranks adds to the norm of the gradient on rank 0 only.
        """
        super().__init__(lives, train)
        self._counts = [rank == 0 or cut.dim is not None for live in lives for cut in live.cuts]

    def _frees_memory(self, passes_s: float) -> bool:
        """Return whether the model is large: its ranks need what they can spare, since each has layers in full too."""
        return self._large

    def _norm(self, norms: Tensor) -> Tensor:
        squares = (norms.square() * torch.tensor(self._counts, device=norms.device)).sum()
        dist.all_reduce(squares)
        return squares.sqrt()


class ShardedForward:
    """The layers as one function, which all ranks call together; it implements `ModelForward`.

    A backward pass from `loss` gives each rank its part of the mean gradient: the mean over the ranks' micro-batches
    or, with tensor parallelism, the gradient of the one micro-batch that all ranks compute.
    """

    def __init__(self, chain: Chain, root: nn.Module) -> None:
        """Compute logits with `chain`, and the loss with `root`, the module that is divided over the ranks."""
        self.plain, self.root = chain, root

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Return logits_BTV."""
        return self.plain(tokens_BT)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token, a scalar."""
        loss: Tensor = self.root(tokens_BT, targets_BT)
        return loss


def _convert(layer: nn.Module, dtype: torch.dtype) -> None:
    """Convert a layer's parameters, but not its buffers, to a dtype, in place."""
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(parameter.detach().to(dtype)))


def draws(model: config.ModelConfig) -> bool:
    """Return whether `build` gives initial weights: True unless they come from a folder that this machine lacks."""
    return model.weights is None or (model.start_from is not None and Path(model.start_from).is_dir())


def build(run: config.Config, device: torch.device, ranks: Orders) -> BuiltReplica:
    """Build this rank's part of the model, with initial weights if `draws` is True. All ranks must call this.

    Only one layer is whole in memory at a time, except a user's layers (`model.layers`).

    Raises:
        UserError: If the layers cannot be built.
    """
    group, dtype = dist.group.WORLD, getattr(torch, run.train.weights)
    assert group is not None, "the ranks have connected"
    mesh = DeviceMesh.from_group(group, device.type)
    found: dict[int, nn.Module] = {}
    tensor = ranks.split is Split.TENSOR
    for number, built in decoder.each(run.model, run.seed, drawn=draws(run.model)):
        (layer,) = decoder.placed([built], run, device)
        _convert(layer, dtype)
        if tensor:
            _divide_matrices(layer, mesh)
        else:
            for part in _gathered_apart(layer, run, device):
                fully_shard(part, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        found[number] = layer
    layers = [found[number] for number in sorted(found)]
    lives = [ShardedLive(one, layers, device, run.train, ranks) for one in fragments_of(run)]
    chain = Chain(layers, run.train.compile and not accelerator.compile_failure(device), run)
    root = LossModule(layers, chain)
    if not tensor:
        fully_shard(root, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule) and device.type == "cpu":
            # Gather nothing ahead in the backward pass: it takes memory, and the processor has no time to spare.
            module.set_modules_to_backward_prefetch([module])
    replica = BuiltReplica(run, layers, ShardedInner(lives, run.train, ranks.rank), ShardedForward(chain, root))
    ranks.take(lives, replica.forward)
    ranks.shards.start()
    return replica


def _gathered_apart(layer: nn.Module, run: config.Config, device: torch.device) -> list[nn.Module]:
    """Return the modules of a layer whose weights FSDP2 gathers apart from the layer's other weights.

    On a CPU these are a block's attention and feed-forward: each rank then needs memory for the whole weights and
    gradients of one of them, not of both. GPUs work faster with fewer and larger transfers.
    """
    if device.type != "cpu" or run.model.layers is not None:
        return []
    return [child for child in layer.children() if any(True for _ in child.children())]


def _divide_matrices(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the matrices of an embedding, a block or a head over the ranks of the mesh, in place."""
    plan: dict[str, ParallelStyle] = {}
    for path, module in list(layer.named_modules()):
        name = path.rpartition(".")[2]
        if name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            plan[path] = ColwiseParallel()
            _keep_part(module, mesh, {"weight": 0, "bias": 0})
        elif name in ("o_proj", "down_proj"):
            plan[path] = RowwiseParallel()
            _keep_part(module, mesh, {"weight": 1})
        elif name == "embed_tokens":
            plan[path] = ColwiseParallel(output_layouts=Replicate())
            _keep_part(module, mesh, {"weight": 1})
        elif name == "lm_head":
            plan[path] = ColwiseParallel(output_layouts=Replicate())
            _keep_part(module, mesh, {"weight": 0})
    parallelize_module(layer, mesh, plan)


def _keep_part(module: nn.Module, mesh: DeviceMesh, dims: dict[str, int]) -> None:
    """Keep only this rank's part of each parameter that `dims` names, along that dimension; keep the others whole."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = dims.get(name)
        own = parameter.detach()
        if dim is not None:
            own = own.chunk(mesh.size(), dim)[mesh.get_local_rank()]
        placement = Replicate() if dim is None else Shard(dim)
        part = DTensor.from_local(own.clone().contiguous(), mesh, [placement], run_check=False)
        module.register_parameter(name, nn.Parameter(part))
