"""Divide the matrices of the built-in model over the ranks of an island, so that each computes a part of each product.

This is tensor parallelism (Megatron-LM: Shoeybi et al., arXiv 1909.08053) by torch's DTensor. Each rank has some of the
heads and some of the feed-forward's channels. All ranks compute the same micro-batch, and sum over the ranks twice in
each block and pass. The embedding is divided by channels, the head by tokens of the vocabulary. Each rank has the gains
of all norms. Start reading at `divide`.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


def divide(layer: nn.Module, mesh: DeviceMesh) -> None:
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
