"""The check's steps run on a CPU, with tiny sizes: what a GPU is borrowed for must not fail on a slip of the script.

Steps that start other programs (the doctor, pytest, real peers) are left to `python -m benchmarks.gpu --rehearse`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import plan, swarm
from benchmarks.gpu.notes import read
from benchmarks.gpu.scale import CARD, REHEARSAL

LOOPS = {"tokens_per_s", "step_ms", "mfu", "peak_bytes"}
PARTS = {"passes_ms", "clip_ms", "optimizer_ms", "fetch_ms"}


@pytest.fixture
def taken(tmp_path: Path) -> Any:
    """`taken(step)`: the figures of a step that was taken in this process, none of which has failed."""

    def take(name: str) -> dict[str, Any]:
        command_line.take(name, tmp_path / name, rehearse=True)
        found = read(tmp_path / name)
        assert not [key for key, value in found.items() if isinstance(value, dict) and "failed" in value]
        return found

    return take


def test_ceilings(taken: Any) -> None:
    assert taken("ceilings").keys() >= {"copy on the device, GB/s", "bf16 product of order 64, TFLOP/s"}


def test_kernels(taken: Any) -> None:
    found = taken("kernels")
    assert "proven against torch" in found["chosen"]
    assert found.keys() >= {
        "from host memory, close",
        "from host memory, merge 2 partners",
        "encoding an activation, q4",
    }


@pytest.mark.parametrize(("step", "optimizer"), [("train-125M", "adamw"), ("muon-125M", "muon")])
def test_training_beside_the_bare_loop(taken: Any, step: str, optimizer: str) -> None:
    found = taken(step)
    assert found[f"ours, {optimizer}"].keys() == LOOPS | PARTS | {"reserved_bytes"}
    assert found[f"bare, {optimizer}"].keys() == LOOPS
    assert found[f"claimed bytes, {optimizer}"] > 0


def test_compiled_training_and_the_steps_that_compile_ahead(taken: Any) -> None:
    assert taken("compiled-125M").keys() >= {"ours, compiled", "bare, compiled", "claimed bytes, compiled"}
    assert "bare, compiled" not in taken("compiled-1B")
    assert all("compiling, s" in taken(f"compile-{which}-125M") for which in ("ours", "bare"))


def test_gossip_in_one_process(taken: Any) -> None:
    found = taken("gossip-125M")
    assert found["failures"] == []
    assert found["closing a window"]["count"] == found["merging"]["count"] >= found["fragments"]
    assert found["a checkpoint"]["count"] == 1
    assert found["alone"]["tokens_per_s"] > 0
    assert found["with windows"]["tokens_per_s"] > 0


def test_generation(taken: Any) -> None:
    assert taken("generate-125M").keys() == {"float32, tokens/s", "bfloat16, tokens/s"}


def test_a_step_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert command_line.main(["--rehearse", "--only", "ceilings", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["ceilings"].keys() == {"seconds", "figures"}
    assert "copy on the device" in (tmp_path / "table.txt").read_text()


def test_every_step_of_the_plan_names_a_function_and_a_size(tmp_path: Path) -> None:
    for step in plan.PLAN:
        module, function = step.function.split(".")
        assert (Path(swarm.__file__).parent / f"{module}.py").read_text().count(f"\ndef {function}(") == 1
        for size in [one for one in step.arguments if one[0].isdigit()]:
            on_card, rehearsed = (sum(scale.run(size).model.layer_parameters) for scale in (CARD, REHEARSAL))
            assert on_card > rehearsed


def test_each_peer_of_a_swarm_has_a_device_of_its_own(tmp_path: Path) -> None:
    peers = swarm.DeviceSwarm(CARD.settings("125M"), ["cuda", "cpu"], tmp_path)
    assert len(peers.throttles) == len(peers.devices) == 2
