"""What stands in the picture of a simulated run: its faults, their ends and the curves, read back from SVG."""

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from decentral import simulate
from decentral.core.units import Seconds
from decentral.pictures.run_picture import MOST_FAULTS, draw_run, faulty
from decentral.sim import from_flags, sweep
from decentral.sim.faults import Fault, parse
from decentral.sim.report import RunReport
from decentral.sim.run import Scenario, run

SMALL = ["--peers", "3", "--seconds", "40", "--seed", "5", *(word for one in sweep.SETTINGS for word in ("--set", one))]
FAULTS = "crash 1 at 12; restart 1 at 15; slow 0 x5 at 20 for 5"


def scenario(faults: str) -> Scenario:
    return from_flags.scenario_of(simulate.parse([*SMALL, "--faults", faults]), Path("not written"))


@pytest.fixture(scope="module")
def report() -> RunReport:
    return run(scenario(FAULTS))


def test_it_marks_each_fault_and_says_when_all_was_well(report: RunReport, tmp_path: Path) -> None:
    played = scenario(FAULTS)
    draw_run(report, played.faults, tmp_path / "run.svg")
    shown = [
        "".join(one.itertext()).strip()
        for one in ET.parse(tmp_path / "run.svg").iter("{http://www.w3.org/2000/svg}text")
    ]
    for fault in played.faults:
        assert any(text.startswith(f"{fault}: ") for text in shown), fault
    assert {"tokens/s", "training loss", "virtual seconds"} <= set(shown)
    losses = [one.loss for one in report.samples if one.loss is not None]
    assert losses[-1] < losses[0]
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(
    ("faults", "times"),
    [
        ("", []),
        ("crash 1 at 12", [(12.0, 13.0)]),
        ("slow 0 x5 at 20 for 5; freeze 1 at 22 for 9; crash 2 at 40", [(20.0, 31.0), (40.0, 41.0)]),
        ("slow 0 x5 at 20 for 50; freeze 1 at 22 for 9", [(20.0, 70.0)]),
    ],
)
def test_times_with_faults_are_merged(faults: str, times: list[tuple[Seconds, Seconds]]) -> None:
    assert faulty(parse(faults), 1.0) == times


def test_of_many_faults_the_first_ones_have_a_row(report: RunReport, tmp_path: Path) -> None:
    many = [Fault("crash", float(at), (1,)) for at in range(MOST_FAULTS + 5)]
    draw_run(report, many, tmp_path / "run.svg")
    assert f"{MOST_FAULTS} of {len(many)} faults are shown" in (tmp_path / "run.svg").read_text()


def test_nobody_is_well_while_nobody_lives() -> None:
    recovery_s = run(scenario("crash all at 12; restart all at 20")).recovery_s["crash all at 12"]
    assert recovery_s is None or recovery_s > 8
