"""Seeds that found bugs stay here, and each defence that is switched off is found by a seed: the sweep has teeth.

Which seed finds what changes with whatever a seed draws (decentral/sim/faults.py): then look anew with
`python -m decentral.simulate --sweep 200`, the defence being off.
"""

from dataclasses import replace

import pytest

from decentral.comm.gossip import pull, snapshots
from decentral.comm.net import virtual_network
from decentral.comm.routes import ledger
from decentral.comm.wire import blobs
from decentral.core.algorithms import FragmentContext
from decentral.core.units import Seconds
from decentral.peers.placement import span_move
from decentral.peers.planning import swarm_plans
from decentral.sim import sweep
from decentral.train import micro_batch_numbers, outer

FOUND = {
    28: "a partition: all waited for one silent partner, and the good answers grew old",
    30: "the same, with a writer cut off behind the partition",
    45: "the same",
    46: "the same",
    39: "spans: a peer with room for all layers joined while some had no holder, and refused a state without them",
    51: "spans: of a newcomer's donors none held a layer that somebody else held, and it waited for ever",
    68: "as 28",
    75: "spans: the last holder of a layer died while a newcomer fetched it, and it waited for ever",
    115: "spans: of equal plans some followed one and some the other: each had settled on what it had heard of first",
    167: "spans: as 115, and a plan that was no better than staying any more went on being followed",
    199: "spans: as 115, and who had come late never judged the plan that the others followed",
    223: "spans, symmetric: a slow device's answer was late twice, and the peer was taken for dead",
    249: "allreduce, all down at once: who came back was rounds apart from the others",
    256: "a freeze of 75 s: after it, answers were merged that had come before it",
    298: "the same",
    401: "push-sum, lost answers: a second try was refused, and mass that had arrived was taken back as well",
    404: "the same, with damaged messages",
    529: "a one-way link: the question arrived, its answer never could, and the asker's peers were thought dead",
    657: "push-sum, as 401",
    905: "a liar's slow weights, which nothing limited, threw newcomers far off, and they the others",
    909: "the audit's own: allreduce, the same blob published in two windows was taken for a replay",
}


@pytest.mark.parametrize("seed", FOUND)
def test_what_a_sweep_has_found_stays_mended(seed: int) -> None:
    outcome = sweep.play(seed)
    assert not outcome.violated, f"{FOUND[seed]}: {outcome.said}"


def test_a_seed_stands_for_one_scenario_and_one_digest() -> None:
    assert sweep.scenario_of(3) == sweep.scenario_of(3)
    assert sweep.scenario_of(3).faults != sweep.scenario_of(4).faults
    assert sweep.play(3).digest == sweep.play(3).digest != sweep.play(4).digest


# Teeth

Switch = pytest.MonkeyPatch


def no_baseline(off: Switch) -> None:
    """Progress is counted once because the baseline follows the live weights at each close."""
    close = outer.close

    def broken(slow: outer.Slow, *rest: object) -> tuple[outer.Slow, object]:
        after, sent = close(slow, *rest)  # type: ignore[arg-type]
        return replace(after, baseline=slow.baseline), sent

    off.setattr(outer, "close", broken)


def no_digests(off: Switch) -> None:
    """All digests are the same, so whatever arrives is what was described."""
    off.setattr(blobs, "digest", lambda data: bytes(blobs.DIGEST_BYTES))


def no_replay_check(off: Switch) -> None:
    check = snapshots.check
    off.setattr(
        snapshots,
        "check",
        lambda context, sent, blob, layout, _, now: check(context, sent, blob, layout, -1, now),
    )


def no_write_deadline(off: Switch) -> None:
    off.setattr(virtual_network, "WRITE_S", None)


def no_staleness_limit(off: Switch) -> None:
    """Neither when an answer comes nor when it is merged."""
    check, merge = snapshots.check, pull.PullExchange._merge

    def endless(context: FragmentContext) -> FragmentContext:
        return replace(context, gossip=context.gossip.model_copy(update={"max_age_s": 1e12}))

    def merge_all(machine: pull.PullExchange, now: Seconds) -> object:
        context, machine.context = machine.context, endless(machine.context)
        effects = merge(machine, now)
        machine.context = context
        return effects

    off.setattr(snapshots, "check", lambda context, *rest: check(endless(context), *rest))
    off.setattr(pull.PullExchange, "_merge", merge_all)


def no_void_marks(off: Switch) -> None:
    """What must not count counts: an execution whose origin peer went another way, or gave up."""
    off.setattr(ledger.GradientLedger, "abort", ledger.GradientLedger.commit)


def no_reserved_numbers(off: Switch) -> None:
    """A peer that starts again from an old checkpoint gives numbers out again."""
    off.setattr(micro_batch_numbers.MicroBatchNumbers, "take", lambda own, wished: wished)


def no_others_plans(off: Switch) -> None:
    """Everybody follows what it finds itself."""
    off.setattr(swarm_plans.SwarmPlans, "_read", lambda *_: None)


def no_promises(off: Switch) -> None:
    """Whoever moves needs nobody to stay with what it gives up."""
    off.setattr(span_move.SpanMove, "needed", property(lambda own: 0))


DEFENCES = {  # how to switch it off, the rule that is violated then, and the seed that found it first
    "count-once baseline": (no_baseline, "baseline", 0),
    "digest check": (no_digests, "whole", 10),
    "staleness limit": (no_staleness_limit, "fresh", 24),
    "write deadline": (no_write_deadline, "bounded", 0),
    "replay check": (no_replay_check, "once", 35),
    "void marks": (no_void_marks, "counted", 11),
    "reserved numbers": (no_reserved_numbers, "counted", 67),
    "others' plans": (no_others_plans, "converges", 51),
    "promises": (no_promises, "covered", 51),
}
LOOK = 200  # seeds, in which each must be found


@pytest.mark.parametrize("defence", DEFENCES)
def test_without_a_defence_the_sweep_fails(defence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the seeds below LOOK one finds it; we begin with the one that did."""
    switch_off, rule, first = DEFENCES[defence]
    switch_off(monkeypatch)
    seeds = [*range(first, LOOK), *range(first)]
    found = next((seed for seed in seeds if sweep.play(seed).violated == rule), None)
    assert found is not None, f"{LOOK} seeds passed without the {defence}"
