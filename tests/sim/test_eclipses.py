"""Hostile nodes own a key of the DHT, and hostile peers pass nothing on: the others still learn who is there, and news.

Rosters lack nobody, and a plan or a revocation is at all peers within three renewals of a record, a minute in a real
swarm (decentral/sim/invariants/eclipses.py).
"""

import pytest

from decentral.sim import faults, sweep
from decentral.sim import run as runs
from decentral.sim.invariants.eclipses import EclipseAudit
from decentral.sim.invariants.evidence import Violation
from decentral.sim.run import Scenario, run

SEEDS, BY_DAY = 200, 40  # swarms in all, and those that are played by day, among which every key is eclipsed
EACH = 20  # swarms in one test
FIRST = [pytest.param(one, marks=() if one < BY_DAY else pytest.mark.night) for one in range(0, SEEDS, EACH)]


def news_learned(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run it with its audit, and return of how many plans and revocations the audit knew."""
    audits: list[EclipseAudit] = []
    check = EclipseAudit.check

    def checked(audit: EclipseAudit) -> None:
        audits[:] = [audit]
        check(audit)

    monkeypatch.setattr(EclipseAudit, "check", checked)
    monkeypatch.setattr(runs, "SAMPLES", 1)  # of the report, which nobody reads
    run(scenario)
    (audit,) = audits
    return len(audit.proposed_at) + len(audit.revoked_at.keys() - {0})


@pytest.mark.parametrize("first", FIRST)
def test_an_eclipse_of_any_key_changes_no_roster_and_delays_news_by_little(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + EACH):
        scenario = sweep.eclipsed(seed)
        try:
            learned = news_learned(scenario, monkeypatch)
        except Violation as violation:
            pytest.fail(f"seed {seed}, {faults.text_of(scenario.faults)}: {violation}")
        assert learned == (scenario.faults[0].how != "peers"), f"seed {seed}"


def test_every_key_is_eclipsed_by_one_hostile_peer_or_several() -> None:
    drawn = [sweep.eclipsed(seed).faults for seed in range(BY_DAY)]
    assert {eclipse.how for eclipse, _, _ in drawn} == set(faults.ECLIPSED)
    assert {len(lie.peers) for _, lie, _ in drawn} == {1, 2}
    assert all(faults.parse(faults.text_of(one)) == list(one) for one in drawn)


def test_the_sweep_plays_eclipses() -> None:
    assert sweep.scenario_of(sweep.ECLIPSES_AT) == sweep.eclipsed(sweep.ECLIPSES_AT)
