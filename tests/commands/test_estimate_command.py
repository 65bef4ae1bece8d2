"""python -m decentral.estimate as a user runs it: what it says of a swarm, and one clear line for what is wrong."""

import json
import re

import pytest

from decentral.commands import estimate
from decentral.commands.estimates import own_speed, peer_devices, playing, size_table
from decentral.commands.estimates.own_speed import OwnSpeed
from decentral.commands.estimates.size_table import SHOWN_SIZES
from decentral.core.strict_json import JsonObject

QUICK = ["--seconds", "0.1"]
SWARM = "2x4090 home:50/500, A100 oregon"


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> JsonObject:
    assert estimate.main([*QUICK, *flags, "--json"]) == 0
    found: JsonObject = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert estimate.main(flags) == 2
    told = capsys.readouterr().err.splitlines()
    (line,) = (one for one in told if not one.startswith("playing plans, "))
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
    assert estimate.main([*QUICK, "--model", "125M", "--peers", SWARM, "--tokens", "10B", "--price", "0.25"]) == 0
    out, err = capsys.readouterr()
    assert err == "playing plans, up to 0.1 s on a quiet machine\n"
    text = " ".join(out.split())
    for part in (
        "2x4090 home",
        "1xA100 oregon",
        "tokens/s",
        "limit: compute",
        "a device alone, with the whole model: ",
        "all together: ",
        "10 B tokens of one byte each (a tokenizer's, of about four: --set model.vocabulary=32768): ",
        "price: 0.75 an hour; in all ",
        "in the currency of --price",
        "(assumed)",
    ):
        assert part in text


def test_tokens_of_a_tokenizer_are_not_said_to_be_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "125M", "--peers", "4090", "--tokens", "10B", "--set", "model.vocabulary=32768"]
    assert estimate.main([*QUICK, *flags]) == 0
    assert "\n10 B tokens of a vocabulary of 32768: " in capsys.readouterr().out


def test_bytes_that_stay_inside_a_place_are_told_from_those_that_leave_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--model", "125M", "--peers", SWARM)
    home, oregon = found["peers"]
    assert 0 < home["leaving_bytes_per_hour"]["mid"] < home["sent_bytes_per_hour"]["mid"]
    assert 2 * home["leaving_bytes_per_hour"]["mid"] == pytest.approx(found["links"][0]["up"]["mid"], rel=1e-3)
    assert oregon["leaving_bytes_per_hour"] == oregon["sent_bytes_per_hour"]
    for peers, end in (
        ("2x4090 home", r", none of it to other places"),
        (SWARM, r", [\d.]+ .B \(.*\) of it to other places"),
    ):
        assert estimate.main([*QUICK, "--model", "125M", "--peers", peers]) == 0
        assert re.search(rf"sends .* an hour each{end}\n", capsys.readouterr().out)


def test_machines_in_separate_homes_do_not_share_a_link(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playing, "GOSSIP_SETTLED_S", 0.0)
    shared, apart = (told(capsys, "--model", "125M", "--peers", f"4x4090 {at}:50/500") for at in ("home", "homes"))
    assert shared["peers"][0]["leaving_bytes_per_hour"]["mid"] == 0
    assert any("4 machines share the place home and its link" in note for note in shared["notes"])
    (kind,), (link,) = apart["peers"], apart["links"]
    assert kind["leaving_bytes_per_hour"] == kind["sent_bytes_per_hour"] == link["up"]
    assert 0 < link["up"]["mid"] <= 50e6 / 8 * 3600 * 1.01
    assert any("those of at most the first 40 minutes; windows may shorten" in note for note in apart["notes"])
    assert estimate.main([*QUICK, "--model", "125M", "--peers", "4x4090 homes:50/500"]) == 0
    assert "link of each of homes, 50/500 Mb/s: " in capsys.readouterr().out


def test_without_a_model_a_table_says_which_sizes_these_peers_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--peers", "4x3080 lab")
    assert any(note.startswith("an optimizer step has 16 sequences: ") for note in found["notes"])
    rows = found["sizes"]
    *fit, last = rows
    assert [row["model"] for row in rows] == list(SHOWN_SIZES[: len(rows)])
    assert (fit[0]["holds"], fit[0]["limit"]) == ("whole model", "compute")
    assert fit[-1]["holds"].endswith(" layers")
    assert last["holds"] == "does not fit"
    assert re.search(r"needs \d.* GB.* have 40.0 GB", last["limit"])
    assert "tokens_per_s" not in last
    speeds = [row["tokens_per_s"]["mid"] for row in fit]
    assert speeds == sorted(speeds, reverse=True)
    for row in fit:
        days = 20 * row["parameters"] / row["tokens_per_s"]["mid"] / 86400
        assert row["days"]["mid"] == pytest.approx(days, rel=2e-3)


def test_a_size_has_the_same_figure_in_the_table_and_alone_each_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock says: a search ends after an amount of work."""
    monkeypatch.setattr(size_table, "SHOWN_SIZES", ("350M", "1B"))
    peers = "4x3080 lab"
    rows = told(capsys, "--peers", peers)["sizes"]
    alone = [told(capsys, "--model", row["model"], "--peers", peers) for row in rows]
    assert [row["tokens_per_s"] for row in rows] == [one["tokens_per_s"] for one in alone]
    assert [row["limit"] for row in rows] == [re.split("[:;]", one["limit"])[0] for one in alone]
    assert told(capsys, "--model", "1B", "--peers", peers) == alone[1]


@pytest.mark.parametrize("size", ["1B", "3B"])
def test_another_card_lowers_no_speed(capsys: pytest.CaptureFixture[str], size: str) -> None:
    """One that cannot hold the model is left out if routes through it are slower."""
    swarms = ("2xA100 lab", "2xA100 lab, 3060 home:5/20")
    without, beside = (told(capsys, "--model", size, "--peers", peers)["tokens_per_s"]["mid"] for peers in swarms)
    assert beside >= without


def test_a_slow_card_that_leads_the_search_astray_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    without, beside = (
        told(capsys, "--model", "1B", "--peers", peers) for peers in ("4x3080 lab", "4x3080 lab, T4 home:1/5")
    )
    assert beside["tokens_per_s"]["mid"] >= without["tokens_per_s"]["mid"]


def test_it_is_not_said_that_a_device_holds_more_than_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate.main([*QUICK, "--model", "1B", "--peers", "2x4090 homes, 3060 homes-b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (whole,) = [line for line in lines if line.startswith("2x4090 homes: ")]
    (part,) = [line for line in lines if line.startswith("1x3060 homes-b: ")]
    found = re.fullmatch(r"2x4090 homes: each holds the whole model \(([\d.]+) GB of its ([\d.]+) GB\)", whole)
    assert found
    assert float(found[1]) <= float(found[2])
    assert re.search(r": each holds .*\(the whole model needs [\d.]+ GB; each has 12.0 GB\)", part)


def test_the_table_has_days_and_price_of_the_tokens_that_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_table, "SHOWN_SIZES", ("125M", "1B"))
    found = told(capsys, "--peers", "8xH100 lab", "--tokens", "1B", "--price", "2")
    for row in found["sizes"]:
        assert row["days"]["mid"] == pytest.approx(1e9 / row["tokens_per_s"]["mid"] / 86400, rel=2e-3)
        assert row["price"]["mid"] == pytest.approx(row["days"]["mid"] * 24 * 16, rel=2e-3)
    assert estimate.main([*QUICK, "--peers", "8xH100 lab", "--tokens", "1B", "--price", "2"]) == 0
    text = capsys.readouterr().out
    for part in ("holds", "days and price", "1B", "whole", "note: --model SIZE"):
        assert part in text


def test_the_speed_of_this_machine_is_measured_once_for_the_whole_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def flops_here(peers: int) -> float:
        asked.append(peers)
        return 1e11

    monkeypatch.setattr(size_table, "flops_here", flops_here)
    small, larger, *_ = told(capsys, "--peers", "2xcpu home")["sizes"]
    assert asked == [2]
    assert small["tokens_per_s"]["mid"] > 5 * larger["tokens_per_s"]["mid"]
    assert small["tokens_per_s"]["mid"] < 2 * 1e11 / (6 * small["parameters"])


def test_this_machine_is_measured_with_as_many_peers_as_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def own_speed(_run: object, peers: int) -> OwnSpeed:
        asked.append(peers)
        return OwnSpeed(0.1, 1e-8)

    monkeypatch.setattr(peer_devices, "own_speed", own_speed)
    found = told(capsys, "default", "--peers", "2xcpu, this lab")
    assert asked == [3]
    assert found["tokens_per_s"]["mid"] == pytest.approx(3 * 8 * 128 / 0.1, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--peers", "4x4091 home"], "did you mean RTX 4090?"),
        (["--peers", "4090", "--model", "1Q"], "--model expects a size such as 125M or 1B, or a config; got '1Q'"),
        (["--peers", "4090", "--model", "1,3B"], "got '1,3B'; write 1.3B"),
        (["--peers", "4090", "--model", "smal"], "did you mean small?"),
        (["small", "--model", "default", "--peers", "4090"], "not both"),
        (["--peers", "4090", "--tokens", "many"], "argument --tokens: expected a number such as"),
        (["--peers", "4090", "--price", "cheap"], "--price expects"),
        (["--peers", "4090", "--price", ""], "argument --price: expected a value; got ''"),
        (["--peers", "4090", "--price", "=0.35"], "--price expects 0.4, or 4090=0.35,A100=1.2"),
        (["--peers", "4090", "--price", "4090=1,RTX 4090=2"], "--price has two prices for RTX 4090"),
        (["--peers", "4090", "--price", "0,30"], "got '0,30'; write 0.30"),
        (["--peers", "4090", "--price", "4090=0,35"], "got '4090=0,35'; write 4090=0.35"),
        (["--peers", "4090", "--tokens", "1,3B"], "got '1,3B'; write 1.3B"),
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
