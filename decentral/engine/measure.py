"""Choose the devices that `--device` names, and measure a device's FLOP/s, tokens/s and best size of a micro-batch."""

import platform
import time
from dataclasses import replace
from pathlib import Path

import torch

from decentral.core import config
from decentral.core.device_names import ACCELERATORS, valid_device
from decentral.core.errors import UserError
from decentral.core.layer_work import UNMEASURED
from decentral.core.rank_place import Place
from decentral.core.units import Measured, plural
from decentral.engine import accelerator, control_groups
from decentral.engine.step import ALONE, Device, ModelForward, Ranks

PASSES_S = 0.5  # when the timed passes have taken this long in all, no further pass is timed
MATMUL_S = 0.2
LARGEST = 512  # a micro-batch with more sequences is not measured
# Of all micro-batches with at least this share of the best tokens/s, the smallest is chosen: it allows the most steps.
GOOD_ENOUGH = 0.9


def choose(wanted: str, throttle: float = 1.0, emulated_s: float = 0.0) -> Device:
    """Return the device that `--device` names.

    Args:
        wanted: The value of `--device`, as in core/device_names.py.
        throttle: Factor by which computing is slowed down, to imitate a slower device.
        emulated_s: Seconds that a micro-batch through the whole model takes at least, to emulate a slower device; 0
            emulates none.

    Raises:
        UserError: If the value is not valid, or this machine does not have the device.
    """
    device = torch.device(accelerator.type_here() if valid_device(wanted) == "auto" else wanted)
    if device.type != "cpu" and (device.index or 0) >= (count := accelerator.count(device)):
        kind = device.type
        none = f"no {ACCELERATORS[kind]} device; use --device cpu"
        few = {0: none, 1: f"only {kind}:0"}.get(count, f"only {kind}:0 to {kind}:{count - 1}")
        raise UserError(f"--device {wanted}: this machine has {few}")
    return Device(device, accelerator.training_dtype(device), throttle, emulated_s)


def devices(wanted: str, place: Place | None) -> list[str]:
    """Return the names of devices, one for each rank of this peer on this machine.

    Args:
        wanted: The value of `--device`: one name, or several names with commas between them.
        place: This process's place among the ranks that torchrun started; None: not started by torchrun.

    Raises:
        UserError: If a device is missing or named twice, the devices have different types, or their number is not the
            number of ranks.
    """
    names = wanted.split(",")
    found = [choose(name).device for name in names]
    if len({device.type for device in found}) > 1:
        raise UserError(f"--device {wanted}: the devices of one peer must be of one type; start a peer for each type")
    ranks = len(names) if place is None else place.local_size
    if place is not None and len(names) == 1 and found[0].index is None:
        kind = found[0].type
        names = [kind if kind == "cpu" else f"{kind}:{rank}" for rank in range(ranks)]
        found = [choose(name).device for name in names]
    if len(names) != ranks:
        raise UserError(f"--device {wanted}: {ranks} ranks need a device each; name {ranks} devices, or --device cuda")
    if found[0].type != "cpu" and len({device.index or 0 for device in found}) < len(found):
        raise UserError(f"--device {wanted} names a device twice; name a different device for each rank")
    return names


def measure(
    forward: ModelForward, model: config.ModelConfig, device: Device, micro_batch: int, work: float = 1.0
) -> Measured:
    """Measure the device: its name, memory, FLOP/s, and tokens/s of training the layers of `forward`.

    Speeds include throttling and emulation. For an island (a peer with several devices), tokens/s are those of all
    ranks together, including the averaging of gradients; FLOP/s are those of rank 0 times the number of ranks; and the
    memory is that of one device. Measuring takes well under a second with a small model.

    Args:
        forward: The layers to time, tokens_BT -> logits_BTV or hidden_BTD.
        model: The section `model` of the config.
        device: The device to measure.
        micro_batch: Number of sequences of each timed micro-batch.
        work: The share of the model's work that the layers do. With emulation, they take at least this share of the
            emulated time.
    """
    of_device = without_speed(device)
    trained_s = max(step_s(forward, model, device, micro_batch), device.emulated_s * work) * device.throttle
    return replace(of_device, tokens_per_s=device.ranks.readers * micro_batch * model.context / trained_s)


def without_speed(device: Device) -> Measured:
    """Measure the device's name, memory and FLOP/s, without its training speed: `tokens_per_s` is 0."""
    ranks, name = device.ranks, device_name(device.device)
    name = name if ranks.size == 1 else f"{ranks.size} x {name}"
    flops = _flops(device) / device.throttle
    return Measured(name, memory_bytes(device.device), ranks.size * flops, 0.0, UNMEASURED)


def step_s(forward: ModelForward, model: config.ModelConfig, device: Device, micro_batch: int) -> float:
    """Return the seconds of a micro-batch's two passes, as a mean over all ranks. All ranks must call it together."""
    return _trained_s(forward, model, device, micro_batch, device.ranks)


def micro_batch(forward: ModelForward, model: config.ModelConfig, device: Device, most: int = LARGEST) -> int:
    """Return the smallest number of sequences whose tokens/s are at least GOOD_ENOUGH of the highest that is measured.

    Micro-batches of more than `most` sequences are not tried.

    Raises:
        UserError: If not even one sequence fits into the device's memory.
    """
    rates: dict[int, float] = {}
    size = 1
    while size <= most and (not rates or rates[size // 2] > GOOD_ENOUGH * max(rates.values())):
        try:
            rates[size] = size / _trained_s(forward, model, device, size)
        except torch.OutOfMemoryError:
            accelerator.free_cache(device.device)
            break
        size *= 2
    if not rates:
        raise UserError(
            f"not even one sequence of {model.context} tokens fits into the memory of {device_name(device.device)}; "
            "use a smaller model or a shorter model.context"
        )
    return min(size for size, rate in rates.items() if rate >= GOOD_ENOUGH * max(rates.values()))


def _trained_s(
    forward: ModelForward, model: config.ModelConfig, device: Device, sequences: int, ranks: Ranks = ALONE
) -> float:
    """Return the seconds of a forward and a backward pass: the fastest of three timed passes.

    A GPU's first pass is not timed, since it loads libraries and compiles kernels, for minutes at worst. With a large
    model on a slow processor only one or two passes are timed (PASSES_S). The time of each pass is the mean over all
    `ranks`, so that all ranks make equally many passes.
    """
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(model.vocabulary, (sequences, model.context), generator=generator).to(device.device)
    targets_BT = torch.zeros_like(tokens_BT)  # target 0 is valid whatever the model's number of outputs
    passes_s: list[float] = []
    warm_up = 0 if device.device.type == "cpu" else 1
    while len(passes_s) < warm_up + 3 and sum(passes_s[warm_up:]) <= PASSES_S:
        accelerator.wait(device.device)
        began = time.perf_counter()
        with device.autocast():
            loss = forward.loss(tokens_BT, targets_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        accelerator.wait(device.device)
        took_s = torch.tensor(time.perf_counter() - began, dtype=torch.float32, device=device.device)
        passes_s.append(float(ranks.end(took_s)))
    return min(passes_s[warm_up:])


def _flops(device: Device) -> float:
    """Return the FLOP/s of matrix products in the training dtype: those of the fastest products in MATMUL_S seconds.

    A product of two n x n matrices counts 2 n^3. A GPU is waited for after several products, as a wait takes time too.
    """
    n, products = (512, 1) if device.device.type == "cpu" else (4096, 8)
    matrix_NN = torch.randn(n, n, device=device.device).to(device.dtype)
    took_s, began = [_products_s(matrix_NN, products)], time.perf_counter()  # the first products also load libraries
    while time.perf_counter() - began < MATMUL_S:
        took_s.append(_products_s(matrix_NN, products))
    return 2 * n**3 * products / min(took_s)


def _products_s(matrix_NN: torch.Tensor, products: int) -> float:
    """Return the seconds that a number of products of this matrix with itself take."""
    accelerator.wait(matrix_NN.device)
    began = time.perf_counter()
    for _ in range(products):
        _ = matrix_NN @ matrix_NN
    accelerator.wait(matrix_NN.device)
    return time.perf_counter() - began


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's name and the number of threads that torch uses."""
    if device.type != "cpu":
        return accelerator.name(device)
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'CPU'}, {plural(torch.get_num_threads(), 'thread')}"


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of memory that the model may use: what is free on a GPU, or a part of the host's."""
    if device.type != "cpu":
        return accelerator.memory_bytes(device)
    return machine_bytes()


def machine_bytes() -> int:
    """Return the host's memory that the model may use, in bytes.

    It is the whole memory, or a container's limit less the memory that this process already uses: libraries such as
    torch take about 0.3 GB, which matters in a small container.
    """
    limit = control_groups.limit_bytes()
    return control_groups.host_bytes() if limit is None else max(0, limit - control_groups.resident_bytes())
