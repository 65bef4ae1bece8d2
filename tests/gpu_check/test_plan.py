"""Steps run one after another with limits, whatever becomes of one of them, and all that was measured is kept."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import plan
from benchmarks.gpu.notes import Notes, read
from benchmarks.gpu.plan import Check, Step
from decentral.core.errors import UserError


@dataclass(frozen=True)
class Script:
    """What a step does: it notes one figure at once, and ends after so long, well or not."""

    lasts_s: float = 5.0
    fails: bool = False


@dataclass
class World:
    """A clock, and steps that follow their scripts; `story` has what happened."""

    scripts: Mapping[str, Script] = field(default_factory=dict)
    now_s: float = 0.0
    story: list[str] = field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    def launch(self, step: Step, figures: Path, log: Path) -> "Scripted":
        self.story.append(f"{step.name} begins")
        Notes(figures).put("figure", 1)
        log.write_text(f"the log of {step.name}")
        return Scripted(self, step.name, self.scripts.get(step.name, Script()), self.now_s)


@dataclass
class Scripted:
    world: World
    name: str
    script: Script
    began: float
    ended: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self.ended = True
            self.world.story.append(f"{self.name} ends")

    def wait(self, timeout_s: float) -> None:
        ends = self.began + self.script.lasts_s
        self.world.now_s = max(self.world.now_s, min(self.world.now_s + timeout_s, ends))
        if ends > self.world.now_s:
            raise RuntimeError(f"it still runs after {timeout_s:g} s")
        if self.script.fails:
            raise RuntimeError("it ended with status 1")


def step(name: str, limit_s: float = 30.0) -> Step:
    return Step(name, "module.function", (), limit_s)


def test_a_step_that_fails_stops_no_other_and_keeps_its_figures(tmp_path: Path) -> None:
    world = World({"first": Script(fails=True)})
    results = Check(tmp_path, world.launch, world.now, 100).run([step("first"), step("second")])
    assert results == {
        "first": {"seconds": 5.0, "failed": "it ended with status 1", "figures": {"figure": 1}},
        "second": {"seconds": 5.0, "figures": {"figure": 1}},
    }


def test_a_step_is_ended_at_its_limit_and_keeps_its_figures(tmp_path: Path) -> None:
    world = World({"first": Script(lasts_s=1e9)})
    results = Check(tmp_path, world.launch, world.now, 100).run([step("first", limit_s=30), step("second")])
    assert results["first"] == {
        "seconds": 30.0,
        "failed": "it still runs after 30 s",
        "figures": {"figure": 1},
    }
    assert world.story == ["first begins", "first ends", "second begins", "second ends"]


def test_a_step_that_no_time_is_left_for_is_left_out_and_named(tmp_path: Path) -> None:
    world = World({"first": Script(lasts_s=25)})
    results = Check(tmp_path, world.launch, world.now, 30).run([step("first"), step("second")])
    assert results["second"] == {"left_out": True, "figures": {}}


def test_layers_are_compiled_beside_steps_that_share_the_gpu_and_before_steps_that_are_timed(tmp_path: Path) -> None:
    world = World({"compile": Script(lasts_s=20)})
    compiling = Step("compile", "module.function", (), 100, shares=True, compiles_for="timed")
    shared = Step("shared", "module.function", (), 100, shares=True)
    results = Check(tmp_path, world.launch, world.now, 200).run([compiling, shared, step("timed")])
    begins_and_ends = [f"{name} {what}" for name in ("shared", "compile", "timed") for what in ("begins", "ends")]
    assert world.story == ["compile begins", *(line for line in begins_and_ends if line != "compile begins")]
    assert results["compile"]["seconds"] == 20.0


def test_a_compiler_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    world = World({"compile": Script(lasts_s=1e9)})
    compiling = Step("compile", "module.function", (), 1e6, shares=True, compiles_for="timed")
    results = Check(tmp_path, world.launch, world.now, 200).run([compiling, step("timed")])
    assert "still runs" in results["compile"]["failed"]
    assert world.story[-3:] == ["compile ends", "timed begins", "timed ends"]


def test_what_was_measured_is_on_disk_while_the_next_step_runs(tmp_path: Path) -> None:
    world, seen = World(), []

    def launch(one: Step, figures: Path, log: Path) -> Scripted:
        kept = tmp_path / "results.json"
        seen.append(list(json.loads(kept.read_text())) if kept.exists() else [])
        return world.launch(one, figures, log)

    Check(tmp_path, launch, world.now, 100).run([step("first"), step("second")])
    assert seen == [[], ["first"]]
    assert (tmp_path / "log.txt").read_text().count("the log of") == 2


def test_the_steps_that_are_asked_for_come_with_what_compiles_for_them() -> None:
    assert [one.name for one in plan.chosen(["kernels", "compiled-125M"])] == [
        "compile-ours-125M",
        "compile-bare-125M",
        "kernels",
        "compiled-125M",
    ]
    assert plan.chosen([]) == list(plan.PLAN)


def test_a_step_that_is_none_is_refused_with_the_names_of_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="expects some of tests, machine"):
        plan.chosen(["kernel"])
    assert command_line.main(["--only", "kernel"]) == 2
    assert capsys.readouterr().err.startswith("error: --only expects some of")


def test_a_figure_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    path.write_text('{"whole": 1}\n{"cut"')
    assert read(path) == {"whole": 1}


def test_a_figure_that_cannot_be_measured_says_why_and_the_next_one_is_measured(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "figures")
    notes.attempt("first", lambda: 1 // 0)
    notes.attempt("second", lambda: 2)
    assert read(notes.path)["first"]["failed"].startswith("ZeroDivisionError")
    assert read(notes.path)["second"] == 2
