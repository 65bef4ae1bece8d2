"""python -m decentral.estimate as a user runs it: what it says of a swarm, and one clear line for what is wrong."""

import json

import pytest

from decentral.commands import estimate
from decentral.commands.estimates import machines, own_speed
from decentral.core.strict_json import JsonObject

QUICK = ["--seconds", "0.1"]
SWARM = "2x4090 home:50/500, A100 oregon"


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> JsonObject:
    assert estimate.main([*QUICK, *flags, "--json"]) == 0
    found: JsonObject = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert estimate.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_it_predicts_speed_memory_traffic_days_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--model", "125M", "--peers", SWARM, "--tokens", "10B", "--price", "4090=0.35,A100=1.2")
    assert found["parameters"] == pytest.approx(125e6, rel=0.08)
    assert [kind["holds"] for kind in found["peers"]] == ["whole model", "whole model"]
    assert found["limit"].startswith("compute")
    speed, days, price = found["tokens_per_s"], found["days"], found["price"]
    assert speed["low"] < speed["mid"] < speed["high"]
    assert days["mid"] == pytest.approx(1e10 / speed["mid"] / 86400, rel=1e-3)
    assert days["low"] < days["mid"] < days["high"]
    assert found["price_per_hour"] == pytest.approx(2 * 0.35 + 1.2)
    assert price["mid"] == pytest.approx(days["mid"] * 24 * found["price_per_hour"], rel=1e-3)
    home = next(link for link in found["links"] if link["place"] == "home")
    assert 0 < home["up"]["mid"] <= 50e6 / 8 * 3600 * 1.01


def test_a_faster_card_and_more_of_them_train_faster(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = [
        told(capsys, "--model", "125M", "--peers", peers)["tokens_per_s"]["mid"]
        for peers in ("4090 home", "2x4090 home", "2xH100 lab")
    ]
    assert speeds[1] == pytest.approx(2 * speeds[0], rel=1e-3)
    assert speeds[2] > speeds[1]


def test_a_model_that_no_peer_holds_is_cut_and_its_limit_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--model", "1.3B", "--peers", "4x3080 lab")
    assert "layers" in found["peers"][0]["holds"]
    assert found["peers"][0]["memory_bytes"] < found["peers"][0]["whole_model_bytes"]
    assert "micro-batches travel" in found["limit"]


def test_the_text_names_each_group_and_what_limits_the_swarm(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate.main([*QUICK, "--model", "125M", "--peers", SWARM, "--tokens", "10B"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("2x4090 home", "1xA100 oregon", "tokens/s", "limit: compute", "10 G tokens:", "(assumed)"):
        assert part in text


def test_this_machine_is_measured_with_as_many_peers_as_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def step_s(_run: object, peers: int) -> float:
        asked.append(peers)
        return 0.1

    monkeypatch.setattr(machines, "step_s", step_s)
    found = told(capsys, "--peers", "2xcpu, this lab")
    assert asked == [3]
    assert found["tokens_per_s"]["mid"] == pytest.approx(3 * 8 * 128 / 0.1, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--peers", "4x4091 home"], "did you mean RTX 4090?"),
        (["--peers", "4090", "--model", "smal"], "did you mean small?"),
        (["small", "--model", "default", "--peers", "4090"], "not both"),
        (["--peers", "4090", "--tokens", "many"], "argument --tokens: expected a number such as"),
        (["--peers", "4090", "--price", "cheap"], "--price expects"),
        (["--peers", "4090", "--price", "3090=1"], "no peer has a 3090"),
        (["--peers", "4090, A100", "--price", "4090=1"], "--price has no price for A100"),
        (["--peers", "4090", "--set", "gossip.algorithm=allreduce"], "gossip.algorithm pull"),
        (["--peers", "4090", "--model", "70B"], "one peer alone needs"),
        (["--peers", "2x4090 lab", "--model", "70B"], "add peers, or plan a smaller model"),
    ],
)
def test_what_is_wrong_is_one_clear_line(capsys: pytest.CaptureFixture[str], flags: list[str], line: str) -> None:
    assert line in refusal(capsys, *flags)


def test_a_model_that_is_too_large_to_be_timed_here_is_refused_before_it_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_speed, "machine_bytes", lambda: 1 << 28)
    assert "timing this model takes" in refusal(capsys, *QUICK, "--model", "85M", "--peers", "cpu")
