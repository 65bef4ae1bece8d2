"""python -m decentral.plan as a user runs it: files, a live swarm over libp2p, and one clear line for what is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from decentral.comm.wire.identity import Identity
from decentral.commands import plan
from decentral.core.config import Config, ModelConfig
from tests.commands.played_swarm import PlayedSwarm

QUICK = ["--seconds", "0.2"]


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What the command says before it exits 2."""
    assert plan.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_a_shipped_topology_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["data-centre", "--json", *QUICK]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["objective"] == "sync"
    assert shown["cost"]["total"] == pytest.approx(3.4398, abs=1e-4)
    assert shown["baselines"]
    assert shown["reason"]


def test_a_table_and_a_paragraph_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["ten-cities", "--model", "default", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "Tokyo" in out
    assert "purely data-parallel" in " ".join(out.split())


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "give either a TOPOLOGY"),
        (["spot", "--join", "x"], "give either a TOPOLOGY"),
        (["spot", "--seconds", "soon"], "expected a duration such as 90s"),
        (["spot", "--solver", "magic"], "--solver magic"),
        (["spot", "--holders", "0"], "--holders expects at least 1"),
        (["nowhere"], "no file nowhere"),
        (["--join", "127.0.0.1:4001"], "--join expects an address such as"),
    ],
)
def test_what_is_wrong_is_one_clear_line(capsys: pytest.CaptureFixture[str], flags: list[str], line: str) -> None:
    assert line in refusal(capsys, *flags)


def test_aliases_of_a_topology_expand_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without the refusal this file of 400 bytes would make a list of a billion entries."""
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 10))]
    path = tmp_path / "swarm.yaml"
    path.write_text("\n".join(lines))
    assert refusal(capsys, str(path)) == f"topology: {path} has an anchor or an alias at line 1; write the values out"


def test_a_topology_of_a_billion_peers_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "swarm.yaml"
    path.write_text("regions: {x: {count: 1_000_000_000}}")
    assert "expected a swarm of at most 4096 peers; got 1000000000" in refusal(capsys, str(path))


# A live swarm


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedSwarm]:
    swarm = PlayedSwarm(tmp_path_factory.mktemp("swarm"))
    yield swarm
    swarm.close()


@pytest.mark.swarm
def test_a_live_swarm_of_one_is_too_small_and_one_of_two_is_planned_for_its_own_model(
    swarm: PlayedSwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm.wait(swarm.announce("one", "here"))
    assert "a plan needs at least 2 peers; that swarm has 1" in refusal(capsys, "--join", swarm.address)
    swarm.wait(swarm.announce("two", "there"))
    assert plan.main(["--join", swarm.address, "--json", *QUICK]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["objective"] == "throughput"
    assert set(shown["spans"]) == {Identity.load_or_create(swarm.folder / name).peer for name in ("one", "two")}
    assert shown["throughput"]["bound"] == pytest.approx(1000.0)


@pytest.mark.swarm
def test_the_plan_of_a_swarm_whose_model_is_code_runs_none_of_it(
    swarm: PlayedSwarm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "config", Config(model=ModelConfig(layers="strangers:layers")).canonical())
    assert "this run's model is Python code (strangers:layers)" in refusal(capsys, "--join", swarm.address)


@pytest.mark.swarm
def test_what_strangers_call_their_regions_is_shown_as_plain_text(
    swarm: PlayedSwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, region in (("one", "[red]here[/red]"), ("two", "\x1b]0;owned\x07\x1b[2Jthere\u202e")):
        swarm.wait(swarm.announce(name, region))
    assert plan.main(["--join", swarm.address, *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "(red)" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)


@pytest.mark.swarm
def test_an_address_where_nobody_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nobody = Identity.load_or_create(tmp_path / "nobody.key").peer
    said = refusal(capsys, "--join", f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}")
    assert "unreachable" in said
    assert said.endswith("check the address, that the peer there runs, and its port")
