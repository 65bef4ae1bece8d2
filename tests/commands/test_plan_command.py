"""python -m decentral.plan as a user runs it: files, a live swarm over libp2p, and one clear line for what is wrong."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decentral.comm.wire.identity import Identity
from decentral.commands import plan
from decentral.core.config import Config, ModelConfig, load
from decentral.core.ids import PeerId
from decentral.core.layer_work import KindCost, KindCosts
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord, Profile
from decentral.scheduler.sync.sync_plan import SYNC_SOLVERS
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.throughput.solvers import THROUGHPUT_SOLVERS
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import topology_from_profiles
from tests.commands.played_swarm import PlayedSwarm
from tests.commands.refusals import JOIN

QUICK = ["--seconds", "0.2"]
NOW = 1.7e9


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What the command says before it exits 2."""
    assert plan.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_the_help_names_every_solver(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.parse(["--help"])
    words = set(re.findall(r"[a-z]+", capsys.readouterr().out))
    solvers = {name: one.solvers for name, one in plan.OBJECTIVES.items()}
    assert solvers == {"sync": (*SYNC_SOLVERS,), "throughput": (*THROUGHPUT_SOLVERS,)}
    assert words >= {*SYNC_SOLVERS, *THROUGHPUT_SOLVERS}


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
        (["spot", "--join", JOIN], "give either a TOPOLOGY"),
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


LIES: dict[str, dict[str, Any]] = {
    "no memory": {"memory_bytes": 0},
    "no device": {"tokens_per_s": 0.0, "flops": 0.0},
    "hardly any device": {"tokens_per_s": 0.0, "flops": 5e-324},
    "hardly any speed": {"tokens_per_s": 5e-324},
    "little speed": {"tokens_per_s": 1e-300},
    "hardly any link": {"up": 5e-324, "down": 5e-324},
    "a delay without end": {"latency_s": 9e17},
    "all speed": {"tokens_per_s": 1e12},
}


@pytest.mark.parametrize("lie", LIES)
def test_no_figure_of_one_record_keeps_the_others_from_a_plan(lie: str) -> None:
    config = load(None, ["model.depth=4", "model.width=64"])
    cost = KindCost(1e-5, 2e-5, 2000, 100_000)
    honest = Profile("cpu", 1 << 30, 1e10, 1000.0, 1e7, 1e7, 0.01, costs=KindCosts(cost, cost, cost))
    profiles = {**dict.fromkeys("ABC", honest), "L": replace(honest, **LIES[lie])}
    known = {
        PeerId(peer): records.unpack(records.pack(PeerRecord("run", NOW, (), profile, 0, 6, 1, 1, 1)))
        for peer, profile in profiles.items()
    }
    swarm = plan.live_swarm(config, known)
    topology = topology_from_profiles(swarm.profiles, {}, swarm.costs)
    budget = SearchBudget(rounds=3)
    found = throughput_plan(topology, config, "genetic", 0, budget, utilisation=1.0, now=swarm.spans)
    assert found.throughput["tokens_per_s"] > 0.99 * 3 * honest.tokens_per_s
    assert {"A", "B", "C"} <= set(found.spans)


def test_a_peer_that_computes_for_no_other_gets_no_layers() -> None:
    """The memory in the record of an island whose ranks have parts is that of one rank, which holds no layer whole."""
    profile = Profile("cpu", 1 << 30, 1e10, 1000.0)
    profiles = {"A": profile, "B": profile, "island": replace(profile, alone=True)}
    known = {
        PeerId(peer): records.unpack(records.pack(PeerRecord("run", NOW, (), one, 0, 6, 1, 1, 1)))
        for peer, one in profiles.items()
    }
    assert set(plan.live_swarm(load(None, ["model.depth=4", "model.width=64"]), known).profiles) == {"A", "B"}
