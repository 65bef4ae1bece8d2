"""What glibc does with the memory of freed tensors, each in a process of its own."""

import resource
import subprocess
import sys
from pathlib import Path

import torch

from decentral.engine import heap
from tests.patient_time import LIMIT_S


def test_a_freed_tensor_goes_back_to_the_machine() -> None:
    """In a process of its own: here the tests before have left places that large tensors find."""
    code = f"from {__name__} import places_kept; print(places_kept())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "0"


def places_kept() -> int:
    """How many of 16 large tensors' places are this process's after they were freed, with small ones between them."""
    heap.give_back_what_is_freed()
    for size in (4, 8, 16, 31):  # each that is freed would raise glibc's threshold above the next
        torch.empty(size << 18)
    held = [(torch.empty(30 << 18), torch.empty(100 << 8)) for _ in range(16)]
    places, kept = [large.data_ptr() for large, _ in held], [small for _, small in held]
    del held
    return sum(map(is_mapped, places)) if kept else 0


def test_buffers_of_a_megabyte_are_kept_for_the_next_product() -> None:
    code = f"from {__name__} import pages_taken; print(pages_taken())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert int(done.stdout) < 5000


def pages_taken() -> int:
    """How many new pages of memory 50 buffers of 1.2 MB take, one after the other; each alone has 290."""
    heap.keep_what_is_freed(heap.PRODUCT_BYTES)
    torch.zeros(1_200_000, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        torch.zeros(1_200_000, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_the_heap_returns_free_pages_below_what_is_held() -> None:
    code = f"from {__name__} import pages_returned; print(pages_returned())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert int(done.stdout) > 90e6


def pages_returned() -> int:
    """How much less memory a process has after the call, in bytes, of 100 MB freed below a tensor that it holds."""
    heap.keep_what_is_freed()
    freed, held = [torch.ones(1 << 18) for _ in range(100)], torch.ones(1 << 18)
    del freed
    before = resident_bytes()
    heap.return_free_pages()
    return before - resident_bytes() if held.numel() else 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def is_mapped(address: int) -> bool:
    """Whether this process has memory there."""
    areas = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(last, 16) for first, last in areas)
