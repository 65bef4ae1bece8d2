"""Choice of the outer step's kernels: the fastest ones that agree with torch's formulas on this machine.

Kernels that are missing, fail, or differ from torch in one bit are not used; the returned text names them. All compiled
functions, including the codecs, run once here, so that none is compiled during training.
"""

from collections.abc import Callable, Mapping

import torch

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Codecs
from decentral.comm.gossip.kernel_proof import prove
from decentral.comm.gossip.kernels_cpu import CompiledKernels
from decentral.comm.gossip.outer_kernels import OuterKernels, TorchKernels


def best_kernels(device: torch.device, codecs: Codecs) -> tuple[OuterKernels, str]:
    """Return the kernels for a peer that trains on `device`, and the reason for the choice.

    The first call on a machine compiles, which takes seconds. Codecs other than comm/codecs/blockwise.py, such as the
    simulator's, get `TorchKernels`.
    """
    if codecs is not blockwise:
        return TorchKernels(codecs), "torch, since only a real peer's codecs are compiled"
    blockwise.warm_up()
    candidates: dict[str, Callable[[], OuterKernels]] = {"CUDA": lambda: _cuda(device)} if device.type == "cuda" else {}
    return first_proven({**candidates, "compiled for the CPU": CompiledKernels})


def first_proven(candidates: Mapping[str, Callable[[], OuterKernels]]) -> tuple[OuterKernels, str]:
    """Return the first kernels that pass `prove`, else `TorchKernels`, and a text that names them and earlier failures.

    Args:
        candidates: Functions that create kernels, by the kernels' name. They may raise any error, for example if a
            library or a device is missing.
    """
    against: list[str] = []
    for name, make in candidates.items():
        try:
            kernels = make()
            prove(kernels)
        except Exception as error:  # a driver, compiler or kernel can fail with any error, and training must go on
            against.append(f"not {name} ({type(error).__name__}: {error})")
        else:
            return kernels, "; ".join([f"{name}, proven against torch", *against])
    return TorchKernels(blockwise), "; ".join(["torch", *against])


def _cuda(device: torch.device) -> OuterKernels:
    """Return CUDA kernels for `device` after checking them with small chunks; raise ImportError without cupy."""
    from decentral.comm.gossip.kernels_cuda import CudaKernels

    prove(CudaKernels(device, chunk_elements=1024))  # with small chunks, a test vector spans several chunks
    return CudaKernels(device)
