"""Which kernels of the outer step this machine gets: the fastest that prove themselves here against torch's formulas.

A kernel that is missing, fails, or disagrees with torch in one bit is not used, and the reason says so. All that is
compiled runs here once, the codecs too, so nothing is compiled later, while training.
"""

from collections.abc import Callable, Mapping

import torch

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Codecs
from decentral.comm.gossip.kernel_proof import prove
from decentral.comm.gossip.kernels_cpu import CompiledKernels
from decentral.comm.gossip.outer_kernels import OuterKernels, TorchKernels


def best_kernels(device: torch.device, codecs: Codecs) -> tuple[OuterKernels, str]:
    """The kernels for a peer that trains on `device`, and the reason. It takes seconds where nothing is compiled yet.

    Other codecs than those of comm/codecs/blockwise.py, a simulator's for instance, have torch's operations only.
    """
    if codecs is not blockwise:
        return TorchKernels(codecs), "torch, since only a real peer's codecs are compiled"
    blockwise.warm_up()
    candidates: dict[str, Callable[[], OuterKernels]] = {"CUDA": lambda: _cuda(device)} if device.type == "cuda" else {}
    return first_proven({**candidates, "compiled for the CPU": CompiledKernels})


def first_proven(candidates: Mapping[str, Callable[[], OuterKernels]]) -> tuple[OuterKernels, str]:
    """The first that proves itself, or else torch's operations; and the reason, with what was against the others.

    `candidates` make kernels, and raise whatever a missing library or device raises.
    """
    against: list[str] = []
    for name, make in candidates.items():
        try:
            kernels = make()
            prove(kernels)
        except Exception as error:  # a driver, a compiler or a kernel may fail in any way; training goes on without it
            against.append(f"not {name} ({type(error).__name__}: {error})")
        else:
            return kernels, "; ".join([f"{name}, proven against torch", *against])
    return TorchKernels(blockwise), "; ".join(["torch", *against])


def _cuda(device: torch.device) -> OuterKernels:
    """Raises ImportError where cupy is missing: it is imported only for a peer with a GPU."""
    from decentral.comm.gossip.kernels_cuda import CudaKernels

    prove(CudaKernels(device, chunk_elements=1024))  # so that small vectors, too, go through in several chunks
    return CudaKernels(device)
