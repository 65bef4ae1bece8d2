"""The page ranks peers by the newest signed records that it has read, from journals and from the DHT."""

import dataclasses

from decentral.core.credit import SeenWork
from decentral.core.ids import PeerId, RunId, suffix
from decentral.core.journal.lines import Recorded
from decentral.peers.membership.records import PeerRecord
from decentral.view.page.leaders import LEADER_ROW, LEADERS_SHOWN, Leaders
from decentral.view.page.source_lines import RecordLine
from decentral.view.page.swarm_view import SwarmView
from tests.peers.membership import test_statements
from tests.peers.membership.test_statements import identity

ANN, BOB = identity("ann").peer, identity("bob").peer


def record(about: PeerId, tokens: int, time: float = 10.0) -> PeerRecord:
    row = SeenWork(suffix(about), tokens, tokens, 0, 100, 7, 3, 0)
    plain = test_statements.record(time)
    return dataclasses.replace(plain, standing=plain.standing._replace(seen=(row,)))


def rows(leaders: Leaders) -> list[dict[str, object]]:
    return [dict(zip(LEADER_ROW, row, strict=True)) for row in leaders.rows]


def test_peers_are_ranked_by_what_others_say() -> None:
    leaders = Leaders()
    leaders.take(ANN, record(BOB, 900))
    leaders.take(BOB, record(ANN, 100))
    leaders.tick(10.0)
    assert [(row["peer"], row["tokens"], row["share"]) for row in rows(leaders)] == [(BOB, 900, 0.9), (ANN, 100, 0.1)]
    assert rows(leaders)[0]["title"] == f"{BOB[-6:]} (ann)"


def test_an_older_record_and_one_of_another_run_change_nothing() -> None:
    leaders = Leaders()
    leaders.take(ANN, record(BOB, 900))
    leaders.take(ANN, record(BOB, 5, time=9.0))
    leaders.take(BOB, dataclasses.replace(record(ANN, 5), run=RunId("other-0000")))
    leaders.tick(10.0)
    assert [row["tokens"] for row in rows(leaders)] == [900, 0]


def test_the_page_takes_records_and_journals_and_ignores_a_forged_line() -> None:
    view = SwarmView()
    view.take("", Recorded(10.0, RecordLine(peer=ANN, record=record(BOB, 900))))
    view.take(ANN, Recorded(11.0, test_statements.line("bob", 11.0)))
    view.take(ANN, Recorded(12.0, dataclasses.replace(test_statements.line("bob", 12.0), record="AAAA")))
    view.tick(20.0)
    told = view.snapshot()
    assert told["leader_row"] == LEADER_ROW
    assert {row[0] for row in told["leaders"]} == {ANN, BOB, test_statements.ROW.peer}


def test_a_browser_gets_few_rows_of_a_large_swarm() -> None:
    leaders = Leaders()
    for number in range(3 * LEADERS_SHOWN):
        leaders.take(PeerId(f"Qm{number:044d}"), record(ANN, number))
    leaders.tick(10.0)
    assert len(leaders.rows) == LEADERS_SHOWN


def test_contributions_are_not_computed_at_each_update() -> None:
    leaders = Leaders()
    leaders.take(ANN, record(BOB, 900))
    leaders.tick(10.0)
    leaders.take(ANN, record(BOB, 1800, time=11.0))
    leaders.tick(11.0)
    assert rows(leaders)[0]["tokens"] == 900
    leaders.tick(15.0)
    assert rows(leaders)[0]["tokens"] == 1800
