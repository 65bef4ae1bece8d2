"""Seeds that found bugs stay here, and each defence that is switched off is noticed by some seed.

Which seed finds what changes when seeds draw something else (decentral/sim/faults.py). Then switch the defence off and
look for another seed with `python -m decentral.simulate --sweep 200`.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from decentral.comm.gossip import exchange, snapshots
from decentral.comm.gossip.pull_rule import PullRule
from decentral.comm.gossip.snapshots import FragmentContext
from decentral.comm.pipeline import ledger
from decentral.comm.wire import blobs
from decentral.core.units import Seconds
from decentral.engine import micro_batch_numbers
from decentral.scheduler.placement import move, plans
from decentral.sim import sweep
from decentral.sim.invariants import routes
from decentral.sim.network import virtual_network
from tests.sim.broken import no_baseline

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()
FOUND = {
    28: "a partition: all waited for one silent partner; behind a relay: a link that was never measured in time",
    30: "the same, with a writer cut off behind the partition",
    39: "spans: a peer with memory for all layers joined while some had no holder, and refused a state without them",
    45: "the same",
    46: "the same",
    51: "spans: none of a newcomer's donors held a layer that another peer held, and it waited for ever",
    68: "as 28",
    75: "spans: the last holder of a layer died while a newcomer fetched it, and it waited for ever",
    115: "spans: of two equal plans some peers followed one and some the other: each took what it had heard of first",
    155: "a bug of the audit: allreduce, a forged blob was what its peer published a round later",
    167: "spans: as 115, and a plan was still followed when it was no better than staying any more",
    199: "spans: as 115, and a peer that came late never judged the plan that the others followed",
    249: "allreduce, all down at once: peers that came back were rounds apart from the others",
    256: "a freeze of 75 s: after it, answers were merged that had come before it",
    298: "the same",
    487: "spans: a peer did not judge the others' plan again when their first moves had made it the better one",
    529: "a one-way link: the question arrived, its answer never could, and the asker's peers were thought dead",
    535: "a bug of the audit: a peer that died before its first checkpoint came back with its history",
    905: "a Byzantine peer's slow weights, which nothing limited, threw newcomers far off, and those the others",
    909: "a bug of the audit: allreduce, the same blob published in two windows was taken for a replay",
    1019: "a bug of the simulator: what came to a stopped process was lost when it was stopped again",
    2076: "a bug of the audit: what a forged snapshot moved counted as the drift of pulls",
    2693: "a bug of the simulator: records outlived all nodes of the DHT, and a swarm with an earlier clock found them",
    4653: "a peer whose clock was an hour behind took the others' records for good ones, and not itself for alone",
    5455: "a bug of the audit: micro-batches waited for layers that nobody held, as long as they may",
    6935: "a bug of the simulator: a peer that died early did not know the address that it had joined at any more",
    6903: "a bug of the audit: two of four peers lied, and nothing is promised where most partners do",
    8854: "a thin uplink: two uploads of a megabyte were late, and a peer that answered all else was taken for dead",
    9612: "records of an hour ahead stayed in the DHT, and those that the same peers wrote later were not taken",
    9743: "a peer that was killed counted a micro-batch again, when it came to it once more to be audited",
    10174: "a peer was told to start again for the others' time, and kept its own: most of those it knew had that",
    15655: "answers to questions that had waited for one stalled link took two peers for dead, one after the other",
    23055: "the same",
    24735: "a peer with a wrong clock was alone, knew of nobody, and those that found it did not tell it",
    25615: "two peers followed equal plans, each its own, which were little better than staying by then",
    28575: "a swarm came back in two parts with an hour between their clocks, and nobody looked for the others",
    32943: "peers that had judged plans at different moments followed different ones",
    35821: "both partners of a window were liars, and so what they claimed was usual",
    37175: "a bug of the audit: who began from nothing again merged what its life before had merged",
    38101: "a bug of the simulator: one copy of a message that came twice was damaged, and the other not",
    45175: "a bug of the audit: a peer cannot see one that has another time, and begins from nothing",
    46615: "a move failed for a full disk: the fragments that stayed had forgotten what they had merged",
    48655: "a bug of the audit: peers that all hold the whole model route nothing",
    204255: "two parts of a swarm with an hour between their clocks, one of which knew nobody of the other",
    210223: "a bug of the audit: ten micro-batches were offered to seven peers each, and counted as 70 questions",
    390262: "allreduce: a newcomer without a step took the weights of the only peer that had one, a liar, for the mean",
    407852: "a bug of the audit: a peer that had been away for half a minute had saved nothing while it was",
    445255: "of two equally good plans some followed the one, some the other, and moved to and fro",
    495583: "spans: peers with the whole model alone held the first layers, and those with parts had nothing to do",
    550262: "a peer was stopped while it closed a window, and published that as new when it went on",
    602863: "a lie that no device could have sent was remembered, and the next liar said what was usual",
    694375: "two parts of a swarm with an hour between their clocks, and one peer that knew as many of each",
    947263: "a bug of the faults: a peer whose disk was wiped started as itself again, and so its numbers did",
    615254: "a bug of the audit: two answers over a slow link were cut, and the next record was four seconds away",
}

SWEPT = int(MAKEFILE.partition("--sweep ")[2].split()[0])  # seeds below it are played by the sweep of `make test`
# Seeds of two seconds and more, which take too long by day
LONG = {51, 75, 115, 155, 167, 199, 256, 298, 487, 535, 1019, 5455, 6903, 6935, 9743, 15655, 23055, 24735, 25615, 28575}
LONG |= {
    32943,
    35821,
    37175,
    38101,
    45175,
    46615,
    48655,
    204255,
    210223,
    445255,
    495583,
    550262,
    602863,
    694375,
    947263,
}
FAR = ("staleness limit", "write deadline", "others' plans")  # defences whose seed takes 15 seconds and more, the same
NIGHT = LONG | {seed for seed in FOUND if seed < SWEPT}


@pytest.mark.parametrize("seed", [pytest.param(one, marks=pytest.mark.night) if one in NIGHT else one for one in FOUND])
def test_a_bug_that_the_sweep_has_found_stays_mended(seed: int) -> None:
    outcome = sweep.play(seed)
    assert not outcome.violated, f"{FOUND[seed]}: {outcome.said}"


def test_more_offers_than_executions_explain_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "CANDIDATES", 0)
    outcome = sweep.play(210223)
    assert outcome.violated == "bounded"
    assert "offers" in outcome.said


def test_a_seed_stands_for_one_scenario_and_one_digest() -> None:
    one, other = 8854, 4653  # short ones
    assert sweep.scenario_of(one) == sweep.scenario_of(one)
    assert sweep.scenario_of(one).faults != sweep.scenario_of(other).faults
    assert sweep.play(one).digest == sweep.play(one).digest != sweep.play(other).digest


# What the sweep finds when a defence is switched off

Switch = pytest.MonkeyPatch


def no_digests(off: Switch) -> None:
    """All digests are the same, so that anything that arrives fits its description."""
    off.setattr(blobs, "digest", lambda data: bytes(blobs.DIGEST_BYTES))


def no_replay_check(off: Switch) -> None:
    check = snapshots.reason_to_refuse
    off.setattr(
        snapshots,
        "reason_to_refuse",
        lambda context, sent, blob, layout, _, now, own: check(context, sent, blob, layout, -1, now, own),
    )


def no_write_deadline(off: Switch) -> None:
    off.setattr(virtual_network, "WRITE_S", 1e9)


def no_staleness_limit(off: Switch) -> None:
    """No age is too old, neither when an answer comes nor when it is merged."""
    check, merge = snapshots.reason_to_refuse, exchange.PullExchange._merge

    def endless(context: FragmentContext) -> FragmentContext:
        return replace(context, fresh_s=1e12)

    def merge_all(machine: exchange.PullExchange, now: Seconds) -> object:
        context, machine.context = machine.context, endless(machine.context)
        effects = merge(machine, now)
        machine.context = context
        return effects

    off.setattr(snapshots, "reason_to_refuse", lambda context, *rest: check(endless(context), *rest))
    off.setattr(exchange.PullExchange, "_merge", merge_all)


def no_aborts(off: Switch) -> None:
    """Aborted executions count, whose origin peer took another route or gave up."""
    off.setattr(ledger.GradientLedger, "abort", ledger.GradientLedger.commit)


def no_reserved_numbers(off: Switch) -> None:
    """A peer that restarts from an old checkpoint gives micro-batch numbers out again."""
    off.setattr(micro_batch_numbers.MicroBatchNumbers, "take", lambda own, wished: wished)


def no_others_plans(off: Switch) -> None:
    """Each peer follows only plans that it finds itself."""
    off.setattr(plans.SwarmPlans, "_read", lambda *_: None)


def no_leases(off: Switch) -> None:
    """A peer that moves needs no other holder's lease for the layers that it gives up."""
    off.setattr(move.SpanMove, "needed", property(lambda own: 0))


def no_settled_windows(off: Switch) -> None:
    """Slow weights are encoded for whoever asks, though the window was merged, which has changed them."""
    off.setattr(snapshots.SnapshotStore, "settle", lambda own: None)


def no_fold(off: Switch) -> None:
    """What a fragment was trained while it rested never gets into its slow weights."""

    def forget(own: PullRule, theta: Tensor) -> None:
        own.baseline = theta

    off.setattr(PullRule, "fold", forget)


DEFENCES = {  # how to switch it off, the rule that is violated then, and the seed that found it first
    "count-once baseline": (no_baseline, "baseline", 0),
    "settled windows": (no_settled_windows, "timely", 10),
    "folded rests": (no_fold, "folded", 10),
    "digest check": (no_digests, "whole", 10),
    "staleness limit": (no_staleness_limit, "fresh", 53),
    "write deadline": (no_write_deadline, "bounded", 0),
    "replay check": (no_replay_check, "once", 35),
    "aborts": (no_aborts, "counted", 11),
    "reserved numbers": (no_reserved_numbers, "counted", 67),
    "others' plans": (no_others_plans, "converges", 115),
    # Missing here is `no_leases`: of the seeds 0 to 303 and 360 to 959 none fails without the leases any more, and in
    # the seeds 40 to 59 no span changes, where four did. It has to be found out why, and a seed found again.
}
SEEDS = 200  # in these, each defence must be found missing


@pytest.mark.parametrize(
    "defence", [pytest.param(one, marks=pytest.mark.night) if one in FAR else one for one in DEFENCES]
)
def test_without_a_defence_the_sweep_fails(defence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the seeds below SEEDS finds it. The search begins with the one that did before."""
    switch_off, rule, first = DEFENCES[defence]
    switch_off(monkeypatch)
    seeds = [*range(first, SEEDS), *range(first)]
    found = next((seed for seed in seeds if sweep.play(seed).violated == rule), None)
    assert found is not None, f"{SEEDS} seeds passed without the {defence}"
