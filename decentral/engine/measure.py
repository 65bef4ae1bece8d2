"""The devices that `--device` names, and of one its FLOP/s, tokens/s on the run's model, a good micro-batch."""

import platform
import time
from dataclasses import replace
from pathlib import Path

import torch

from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.rank_place import Place
from decentral.core.units import Measured, plural
from decentral.engine import control_groups
from decentral.engine.step import ALONE, Device, ModelForward, Ranks

PASSES_S = 0.5  # after so much time no further pass is measured: where passes are long, the first one tells enough
MATMUL_S = 0.2  # how long matrices are multiplied
LARGEST = 512  # sequences in a micro-batch, at most
GOOD_ENOUGH = 0.9  # share of the best tokens/s that a micro-batch must reach; the smallest one gives the most steps


def choose(wanted: str, dtype: str, throttle: float, emulated_s: float) -> Device:
    """The device that `--device` asks for. Raises UserError if it is not there."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"--device expects auto, cpu, cuda or cuda:N; got {wanted!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device expects auto, cpu, cuda or cuda:N; got {wanted!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {wanted}: {torch.cuda.device_count()} CUDA devices are here; use --device cpu")
    chosen = "bfloat16" if dtype == "auto" and device.type == "cuda" else dtype.replace("auto", "float32")
    return Device(device, getattr(torch, chosen), throttle, emulated_s)


def devices(wanted: str, place: Place | None) -> list[str]:
    """The devices of `--device`, one for each rank on this machine. Raises UserError unless they make one peer."""
    names = wanted.split(",")
    found = [choose(name, "auto", 1.0, 0.0).device for name in names]
    if len({device.type for device in found}) > 1:
        raise UserError(f"--device {wanted}: the devices of one peer are of one type; start a peer for each type")
    ranks = len(names) if place is None else place.local_size
    if place is not None and len(names) == 1 and wanted in ("auto", "cpu", "cuda"):
        names = [f"cuda:{rank}" if found[0].type == "cuda" else "cpu" for rank in range(ranks)]
        found = [choose(name, "auto", 1.0, 0.0).device for name in names]
    if len(names) != ranks:
        raise UserError(f"--device {wanted}: {ranks} ranks need a device each; name as many, or --device cuda")
    if found[0].type == "cuda" and len({device.index or 0 for device in found}) < len(found):
        raise UserError(f"--device {wanted} names a device twice; each rank needs its own")
    return names


def measure(
    forward: ModelForward, model: config.ModelConfig, device: Device, micro_batch: int, share: float = 1.0
) -> Measured:
    """Measures the device in well under a second on a small model. Throttling and emulation count, as in training.

    `forward` maps tokens_BT to logits_BTV or to hidden_BTD. It computes this `share` of the model; tokens/s are given
    for the whole model. Those of an island are measured on all ranks at once, gradients averaged as in training; its
    FLOP/s are rank 0's times the ranks, and its memory is one device's.
    """
    ranks, of_device = device.ranks, without_speed(device)
    trained_s = max(step_s(forward, model, device, micro_batch), device.emulated_s * share) * device.throttle
    tokens_per_s = ranks.size * share * micro_batch * model.context / trained_s
    return replace(of_device, tokens_per_s=tokens_per_s)


def without_speed(device: Device) -> Measured:
    """The same but for tokens/s, which are 0: nothing is trained."""
    ranks, name = device.ranks, device_name(device.device)
    name = name if ranks.size == 1 else f"{ranks.size} x {name}"
    flops = _flops(device) / device.throttle
    return Measured(name, memory_bytes(device.device), ranks.size * flops, tokens_per_s=0.0)


def step_s(forward: ModelForward, model: config.ModelConfig, device: Device, micro_batch: int) -> float:
    """Seconds of a forward and a backward pass, the mean over the ranks of an island, each of which has to call it."""
    return _trained_s(forward, model, device, micro_batch, device.ranks)


def micro_batch(forward: ModelForward, model: config.ModelConfig, device: Device) -> int:
    """Sequences of the smallest micro-batch that is nearly as fast as the fastest one that fits the memory.

    Raises UserError if not one sequence fits.
    """
    rates: dict[int, float] = {}
    size = 1
    while size <= LARGEST and (not rates or rates[size // 2] > GOOD_ENOUGH * max(rates.values())):
        try:
            rates[size] = size / _trained_s(forward, model, device, size)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        size *= 2
    if not rates:
        raise UserError(
            f"not even one sequence of {model.context} tokens fits into the memory of {device_name(device.device)}"
        )
    return min(size for size, rate in rates.items() if rate >= GOOD_ENOUGH * max(rates.values()))


def _trained_s(
    forward: ModelForward, model: config.ModelConfig, device: Device, sequences: int, ranks: Ranks = ALONE
) -> float:
    """Return the seconds of a forward and a backward pass: the best of three, because the first ones warm caches up.

    A GPU's first pass loads libraries and compiles kernels, for minutes at worst, so it is not measured. A large model
    on a slow processor has one or two passes: what it trains will soon say more than any measurement. All ranks know
    the mean of their times, and so they make as many passes.
    """
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(model.vocabulary, (sequences, model.context), generator=generator).to(device.device)
    targets_BT = torch.zeros_like(tokens_BT)  # a part of the model may give fewer channels than tokens
    passes_s: list[float] = []
    warm_up = 0 if device.device.type == "cpu" else 1
    while len(passes_s) < warm_up + 3 and sum(passes_s[warm_up:]) <= PASSES_S:
        _wait(device)
        began = time.perf_counter()
        with device.autocast():
            loss = forward.loss(tokens_BT, targets_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        _wait(device)
        took_s = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=device.device)
        passes_s.append(float(ranks.end(took_s)))
    return min(passes_s[warm_up:])


def _flops(device: Device) -> float:
    """FLOP/s in the training dtype, at 2 n^3 for a product of two n x n matrices."""
    n = 4096 if device.device.type == "cuda" else 512
    matrix_NN = torch.randn(n, n, device=device.device).to(device.dtype)
    _wait(device, matrix_NN @ matrix_NN)
    began, products = time.perf_counter(), 0
    while time.perf_counter() - began < MATMUL_S:
        _wait(device, matrix_NN @ matrix_NN)
        products += 1
    return 2 * n**3 * products / (time.perf_counter() - began)


def _wait(device: Device, _: torch.Tensor | None = None) -> None:
    if device.device.type == "cuda":
        torch.cuda.synchronize(device.device)


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'CPU'}, {plural(torch.get_num_threads(), 'thread')}"


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of the GPU's memory, or those that this process may use of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_bytes()


def machine_bytes() -> int:
    """Return the bytes that the model may use: the machine's, or a container's limit less what this process uses.

    Libraries such as torch occupy about 0.3 GB, which matters in a small container.
    """
    limit = control_groups.limit_bytes()
    return control_groups.host_bytes() if limit is None else max(0, limit - control_groups.resident_bytes())
