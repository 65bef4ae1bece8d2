"""python -m decentral.simulate as a user runs it."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from decentral.commands import simulate
from decentral.sim import faults, sweep

QUICK = [word for setting in sweep.SETTINGS for word in ("--set", setting)]
SMALL = ["--peers", "3", "--seconds", "30", "--seed", "5", *QUICK]


def test_it_reports_what_the_swarm_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([*SMALL, "--faults", "crash 1 at 12; restart 1 at 15"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 peers, 30 virtual seconds, seed 5: ")
    for word in ("tokens/s", "least busy peer", "done/solo/failed", "spread", "roster error", "digest"):
        assert word in out
    assert "restart 1 at 15: all well" in out


def test_json_is_one_object_and_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        assert simulate.main([*SMALL, "--json"]) == 0
        printed.append(capsys.readouterr())
    report = json.loads(printed[0].out)
    assert printed[0] == printed[1]
    assert (report["peers"], report["seconds"], report["seed"]) == (3, 30, 5)
    wanted = {"tokens_per_s", "busy_fraction", "sent_bytes", "received_bytes", "exchanges", "spread", "roster_error"}
    assert wanted | {"recovery_s", "digest", "samples", "by_peer"} <= set(report)
    assert len(report["samples"]) == 200


def test_plot_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "swarm.png"
    assert simulate.main([*SMALL, "--json", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_churn_comes_from_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("time,peer,up/down\n12,1,down\n18,1,up\n")
    assert simulate.main([*SMALL, "--json", "--trace", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["lives"] for one in report["by_peer"]] == [1, 2, 1]


def test_links_come_from_a_topology(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([*SMALL, "--json", "--topology", "no such topology"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


LARGE = ("model.depth=4", "model.width=128", "model.context=256", "train.micro_batch=16", "train.optimizer=adamw")
BAD = {
    "no peers": ["--peers", "0"],
    "no time": ["--seconds", "0"],
    "a word for a number": ["--peers", "many"],
    "no number of seconds": ["--seconds", "nan"],
    "endless noise": ["--noise", "inf"],
    "a throttle that is no number": ["--throttle", "1,nan"],
    "an unknown flag": ["--quickly"],
    "an unknown key": ["--set", "gossip.windows=3"],
    "no such config": ["nowhere.yaml"],
    "no fault": ["--faults", "crash"],
    "an unknown fault": ["--faults", "explode 1 at 2"],
    "a negative throttle": ["--throttle", "1,-2"],
    "more throttles than peers": ["--peers", "2", "--throttle", "1,1,3"],
    "more memories than peers": ["--peers", "1", "--memory", "1GB,2GB"],
    "no trace": ["--trace", "nowhere.csv"],
    "layers that fit no peer": ["--memory", "160MB", *(word for one in LARGE for word in ("--set", one))],
    "synchronous rounds": ["--set", "gossip.algorithm=synchronous"],
}


@pytest.mark.parametrize("flags", BAD.values(), ids=BAD)
def test_a_bad_flag_is_one_line_and_exit_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(flags) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert (printed.out, printed.err.count("\n")) == ("", 1)


@pytest.mark.usefixtures("uncounted")
def test_a_violation_is_exit_1_and_says_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*SMALL, "--faults", "crash 1 at 12; restart 1 at 15"]
    with pytest.raises(SystemExit) as caught:
        simulate.main(flags)
    err = capsys.readouterr().err
    assert caught.value.code == 1
    assert "violated: baseline: " in err
    assert "s of virtual time" in err
    assert "seed 5, 3 peers, faults: crash 1 at 12; restart 1 at 15" in err
    assert re.search(r"^ +2\.\d+ \w+\(", err, re.MULTILINE)
    assert "again: python -m decentral.simulate --peers 3 --seconds 30 --seed 5" in err


@pytest.mark.usefixtures("uncounted")
def test_shrink_names_the_fewest_faults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate.main([*SMALL, "--faults", "crash 1 at 12; restart 1 at 15", "--shrink"])
    assert "fewest faults: none" in capsys.readouterr().err


# Sweeps


def test_a_sweep_counts_its_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--sweep", "2", "--seed", "0", "--processes", "1"]) == 0
    assert capsys.readouterr().out.startswith("seeds 0 to 1: 0 violated, ")


def test_a_sweep_can_play_only_the_seeds_with_faults_of_machines_or_with_liars(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate.main(["--sweep", "1", "--seed", "0", "--processes", "1", "--only", "hosts"]) == 0
    assert capsys.readouterr().out.startswith("seeds 0 to 12, 1 with hosts: 0 violated, ")
    found = list(islice(sweep.seeds_from(0, ["hosts", "liars"]), 8))
    assert found == [12, 13, 14, 15, 20, 21, 22, 23]
    for seed in found:
        kinds = {(fault.kind, fault.how) for fault in sweep.scenario_of(seed).faults}
        assert any(kind in faults.HOSTS or how in (*faults.KNOWING_LIES, *faults.HOP_LIES) for kind, how in kinds)
    assert simulate.main(["--sweep", "1", "--only", "disks"]) == 2
    assert "expected one or several of hosts, liars, eclipses" in capsys.readouterr().err


@pytest.mark.usefixtures("uncounted")
def test_a_sweep_that_finds_something_names_the_seed_and_how_to_play_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    with pytest.raises(SystemExit) as caught:
        simulate.main(["--sweep", "2", "--seed", "0", "--processes", "1", "--report", str(report)])
    assert caught.value.code == 1
    again = "python -m decentral.simulate --sweep 1 --seed 0"
    assert f"again: {again}" in capsys.readouterr().err
    left = json.loads(report.read_text())
    assert (left["first_seed"], left["played"]) == (0, 2)
    first = left["violated"][0]
    assert (first["seed"], first["rule"], first["again"]) == (0, "baseline", again)
    assert first["faults"]


def test_a_sweep_ends_when_its_time_is_over(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--sweep", "1000", "--for-seconds", "0.001", "--processes", "1", "--report", str(report)]
    assert simulate.main(flags) == 0
    assert json.loads(report.read_text())["played"] == 1


def test_a_plan_needs_its_topology(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--plan", "plan.json"]) == 2
    assert "--topology" in capsys.readouterr().err
