"""The table has the ratios that a reader would compute, and names what has failed."""

from typing import Any

from benchmarks.gpu.report import table

GB = 10**9


def lines_of(**figures: dict[str, Any]) -> str:
    return "\n".join(table({name.replace("_", "-"): {"figures": own} for name, own in figures.items()}))


def test_nothing_measured_is_an_empty_table() -> None:
    assert table({}) == []


def test_training_stands_beside_the_bare_loop_and_the_claim_beside_the_peak() -> None:
    ours = {"tokens_per_s": 900.0, "step_ms": 20.0, "mfu": 0.3, "peak_bytes": 10 * GB}
    bare = {"tokens_per_s": 1000.0, "step_ms": 18.0, "mfu": 0.33, "peak_bytes": 9 * GB}
    head, row = lines_of(
        train_1B={"ours, adamw": ours, "bare, adamw": bare, "claimed bytes, adamw": 50 * GB}
    ).splitlines()
    assert head.split()[:6] == ["model", "loop", "ours/s", "bare/s", "of", "bare"]
    assert row.split() == ["1B", "adamw", "900", "1,000", "0.90", "0.3", "20", "(18)", "50", "10", "5.00"]


def test_a_loop_without_its_rival_has_no_ratio() -> None:
    _, row = lines_of(train_1B={"ours, adamw": {"tokens_per_s": 900.0}, "bare, adamw": {"failed": "no"}}).splitlines()[
        :2
    ]
    assert row.split()[3:5] == ["-", "-"]


def test_kernels_stand_beside_a_copy() -> None:
    found = {"chosen": "CUDA", "on the device": {"merge": {"ms": 1.0, "GB/s": 1500.0, "of a copy": 0.5}}}
    assert "  merge: 1,500 GB/s, 0.5 of a copy" in lines_of(kernels=found)


def test_gossip_stands_beside_training_alone() -> None:
    found = {"alone": {"tokens_per_s": 200.0}, "with windows": {"tokens_per_s": 150.0}, "failures": ["Merge: no"]}
    lines = lines_of(gossip_125M=found).splitlines()
    assert "  with windows: 150 tokens/s, 0.75 of alone" in lines
    assert lines[-1] == "gossip-125M: failed: Merge: no"


def test_peers_that_exchange_stand_beside_silent_ones() -> None:
    common = {"claimed bytes of a peer": 100 * GB, "bytes in use on the GPU": 28 * GB}
    silent = {"tokens_per_s": [100.0, 100.0], "exchanges": {}, **common}
    pair = {"tokens_per_s": [90.0, 100.0], "exchanges": {"done": 7, "solo": 2}, **common}
    lines = lines_of(swarm_pair=pair, swarm_silent=silent).splitlines()
    assert lines[0] == "swarm-pair: 90 and 100 tokens/s, 0.95 of silent; exchanges: 7 done, 2 solo"
    assert lines[1] == "  a peer claims 100 GB; both use 28 GB of the GPU"


def test_exchanges_that_failed_are_counted_and_are_no_failure_of_the_check() -> None:
    pair = {"tokens_per_s": [90.0, 100.0], "exchanges": {"done": 7, "failed": 2}, "claimed bytes of a peer": GB}
    assert lines_of(swarm_pair=pair).splitlines()[0].endswith("; exchanges: 7 done, 2 failed")
    assert "failed: " not in lines_of(swarm_pair=pair)


def test_what_has_failed_is_named_whole_steps_and_single_figures() -> None:
    found: dict[str, Any] = {
        "kernels": {"failed": "['python', '-m']: it still runs after 60 s\na log\nthe end of its log", "figures": {}},
        "train-1B": {"figures": {"ours, muon": {"failed": "OutOfMemoryError: 80 GB"}}},
    }
    found["gossip-1B"] = {"left_out": True, "figures": {}}
    assert table(found)[-3:] == [
        "gossip-1B: left out, since no time was left",
        "kernels: failed: it still runs after 60 s; the end of its log",
        "train-1B: ours, muon: failed: OutOfMemoryError: 80 GB",
    ]
