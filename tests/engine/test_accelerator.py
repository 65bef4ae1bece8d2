"""Which device a peer gets: the machine's accelerator, whatever kind it is, or a line that says what is missing."""

import pytest
import torch

from decentral.core.errors import UserError
from decentral.engine import accelerator, measure


@pytest.mark.parametrize(("kind", "name"), [("cuda", "CUDA"), ("xpu", "XPU"), ("mps", "MPS")])
def test_a_kind_that_this_machine_lacks_is_one_line(kind: str, name: str) -> None:
    if accelerator.count(torch.device(kind)):
        pytest.skip(f"this machine has {name}")
    with pytest.raises(UserError, match=f"^--device {kind}: this machine has no {name} device; use --device cpu$"):
        measure.choose(kind)


@pytest.mark.parametrize("wanted", ["gpu", "meta", "cuda:x", "tpu:0"])
def test_other_names_are_refused_with_those_that_there_are(wanted: str) -> None:
    with pytest.raises(UserError, match="expects auto, cpu, cuda, xpu or mps"):
        measure.choose(wanted)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_auto_takes_the_accelerator_of_this_machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    assert accelerator.type_here() == kind


def test_auto_is_the_cpu_where_the_accelerator_is_of_a_kind_that_was_never_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("hpu"))
    assert accelerator.type_here() == "cpu"


def test_a_device_that_cannot_multiply_bfloat16_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*shape: int, device: torch.device) -> torch.Tensor:
        raise TypeError("BFloat16 is not supported on this device")

    monkeypatch.setattr(torch, "ones", refuse)
    assert accelerator.training_dtype(torch.device("xpu")) == torch.float32
    assert accelerator.training_dtype(torch.device("cpu")) == torch.float32


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_a_gpu_without_units_for_bfloat16_trains_in_float32(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert accelerator.training_dtype(torch.device("cuda")) == dtype


def test_a_device_whose_compiler_is_missing_trains_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(layer: torch.nn.Module) -> torch.nn.Module:
        raise RuntimeError("backend='inductor' raised:\nRuntimeError: Cannot find a working triton installation")

    linear = torch.nn.Linear(8, 8)
    monkeypatch.setattr(torch.nn, "Linear", lambda *sides, device: linear)
    monkeypatch.setattr(torch, "compile", fail)
    accelerator.compile_failure.cache_clear()
    assert accelerator.compile_failure(torch.device("xpu")) == "RuntimeError: Cannot find a working triton installation"
    accelerator.compile_failure.cache_clear()


def test_compiling_is_for_devices_with_streams() -> None:
    assert accelerator.compile_failure(torch.device("cpu")) == "it is used on CUDA and XPU only"


def test_memory_that_other_programs_use_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
    assert accelerator.memory_bytes(torch.device("cuda")) == 60
