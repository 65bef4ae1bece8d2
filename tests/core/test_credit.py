"""Contributions follow from what several witnesses say, and nobody raises its own by what it says."""

from random import Random

import pytest

from decentral.core import credit
from decentral.core.credit import Credit, SeenWork, Statement, confirmed, contributions, explained_tokens, latest
from decentral.core.ids import PeerId, suffix

NAMES = [PeerId(f"Qm{letter * 44}") for letter in "ABCDEF"]
LIAR = NAMES[-1]
HOUR_S = 3600


def seen(peer: str, per_s: float = 100.0, explained: float | None = None, met_s: int = HOUR_S, **more: int) -> SeenWork:
    shown = per_s if explained is None else explained
    figures = {"carried": 0, "served_bytes": 0, "passed": 0, "failed": 0} | more
    return SeenWork(suffix(PeerId(peer)), round(per_s * met_s), round(shown * met_s), met_s=met_s, **figures)


def swarm(**about_liar: float) -> dict[PeerId, Statement]:
    """Six peers of equal speed; the figures of the last one are as given."""
    return {
        witness: Statement(
            1.0,
            witness[-1],
            360_000,
            [seen(peer, **(about_liar if peer == LIAR else {})) for peer in NAMES if peer != witness],  # type: ignore[arg-type]
        )
        for witness in NAMES
    }


def of(peer: PeerId, statements: dict[PeerId, Statement]) -> Credit:
    return next(one for one in contributions(statements) if one.peer == peer)


def test_equal_peers_have_equal_shares() -> None:
    found = contributions(swarm())
    assert [one.share for one in found] == pytest.approx([1 / 6] * 6, abs=1e-6)
    assert {one.tokens for one in found} == {360_000}
    assert {(one.hours, one.witnesses) for one in found} == {(1.0, 5)}
    assert [one.name for one in found] == list("ABCDEF")


def test_who_claims_ten_times_its_work_has_the_share_of_what_its_windows_explain() -> None:
    assert of(LIAR, swarm(per_s=1000.0, explained=103.0)).share == pytest.approx(1 / 6, rel=0.05)


def test_tokens_never_fall_while_witnesses_publish_one_after_another() -> None:
    """The peer becomes slower, and each witness's record is renewed each minute, at another time."""
    peer, witnesses, found = NAMES[0], NAMES[1:], list[int]()
    statements = {peer: Statement(1.0, "", 0)}
    for minute in range(60, 80):
        for witness in witnesses:
            row = seen(peer, per_s=100.0 - 0.4 * (minute - 60), met_s=60 * minute)
            statements[witness] = Statement(float(minute), "", 0, [row])
            found.append(of(peer, statements).tokens)
    assert found == sorted(found)
    assert found[-1] == pytest.approx(92.4 * 60 * 79, rel=0.02)


def test_a_witness_of_few_of_the_hours_counts_with_the_speed_that_it_saw() -> None:
    peer = NAMES[0]
    hours = [HOUR_S, HOUR_S, HOUR_S // 2, HOUR_S // 3]
    rows = {
        witness: Statement(1.0, "", 0, [seen(peer, met_s=met_s)])
        for witness, met_s in zip(NAMES[1:], hours, strict=False)
    }
    rows[peer] = Statement(1.0, "", 0)
    assert of(peer, rows).tokens == 100 * HOUR_S


def test_a_claim_that_differs_from_what_windows_explain_by_chance_is_believed() -> None:
    most = credit.EXPLAINED_TIMES
    assert of(LIAR, swarm(per_s=100.0, explained=100.5 / most)).tokens == 360_000


def test_what_a_peer_says_about_itself_does_not_count() -> None:
    statements = swarm()
    praise = seen(LIAR, 1e9, met_s=100 * HOUR_S, served_bytes=10**12, carried=10**12, passed=10**6)
    statements[LIAR] = Statement(1.0, "F", 10**15, [*statements[LIAR].seen, praise])
    found = of(LIAR, statements)
    assert (found.tokens, found.hours, found.served_bytes, found.passed) == (360_000, 1.0, 0, 0)
    assert found.claimed_tokens == 10**15


def test_one_friend_raises_nothing() -> None:
    statements = swarm()
    friend = NAMES[0]
    praise = [
        row if row.peer != suffix(LIAR) else seen(LIAR, 1e9, met_s=100 * HOUR_S) for row in statements[friend].seen
    ]
    statements[friend] = Statement(1.0, "A", 1, praise)
    assert of(LIAR, statements).share == pytest.approx(1 / 6, rel=0.001)


def test_a_friend_s_figure_of_a_sum_counts_as_at_most_all_others() -> None:
    assert confirmed([10, 12, 10**15]) == 44
    assert confirmed([10, 10, 10]) == 30
    assert confirmed([7]) == 7
    assert confirmed([]) == 0


def test_one_enemy_lowers_nothing_where_there_are_three_witnesses() -> None:
    statements = swarm()
    blame = [row if row.peer != suffix(LIAR) else seen(LIAR, 0.0, 0.0) for row in statements[NAMES[0]].seen]
    statements[NAMES[0]] = Statement(1.0, "A", 1, blame)
    assert of(LIAR, statements).tokens == 360_000


def test_who_met_a_peer_only_for_a_moment_has_no_say_about_its_speed() -> None:
    statements = swarm()
    for witness in NAMES[:3]:
        rows = [row if row.peer != suffix(LIAR) else seen(LIAR, 1.0, met_s=60) for row in statements[witness].seen]
        statements[witness] = Statement(1.0, witness[-1], 1, rows)
    assert of(LIAR, statements).tokens == 360_000


def three(met_s: dict[tuple[int, int], int], per_s: tuple[float, float, float]) -> dict[PeerId, Statement]:
    """Three peers with these true speeds; `met_s` has the seconds for which (witness, peer) met."""
    return {
        NAMES[witness]: Statement(
            1.0,
            "",
            0,
            [seen(NAMES[peer], per_s[peer], met_s=met_s[witness, peer]) for peer in range(3) if peer != witness],
        )
        for witness in range(3)
    }


@pytest.mark.parametrize(("there", "away"), [(720, 475), (720, 240), (2700, 475), (720, 5)])
def test_a_witness_that_was_away_lowers_nothing_that_the_others_saw(there: int, away: int) -> None:
    """The third of three peers was killed and came back, or the two others had a session of their own."""
    met_s, per_s = {(0, 1): there, (1, 0): there} | dict.fromkeys([(0, 2), (1, 2), (2, 0), (2, 1)], away), (10.0, 9, 3)
    trained = [per_s[0] * there, per_s[1] * there, per_s[2] * away]
    statements = three(met_s, per_s)
    slow = [row._replace(claimed=row.claimed // 2, explained=row.explained // 2) for row in statements[NAMES[2]].seen]
    statements[NAMES[2]] = Statement(1.0, "", 0, slow)  # the one that was away saw only slower hours
    for peer, tokens in enumerate(trained):
        assert of(NAMES[peer], statements).share == pytest.approx(tokens / sum(trained), rel=0.001)
    assert of(NAMES[0], statements).hours == pytest.approx(there / HOUR_S, abs=1e-4)


def test_two_witnesses_of_all_hours_outweigh_three_that_were_away() -> None:
    rows = zip([100.0, 100.0, 80.0, 80.0, 80.0], [HOUR_S, HOUR_S, HOUR_S // 2, HOUR_S // 2, HOUR_S // 2], strict=True)
    statements = {
        witness: Statement(1.0, "", 0, [seen(NAMES[0], per_s, met_s=met_s)])
        for witness, (per_s, met_s) in zip(NAMES[1:], rows, strict=True)
    }
    assert of(PeerId(suffix(NAMES[0])), statements).tokens == 100 * HOUR_S


@pytest.mark.parametrize("lie", [(0.0, HOUR_S), (1e9, HOUR_S), (0.0, 100 * HOUR_S), (1e9, 100 * HOUR_S), (1e9, 1)])
@pytest.mark.parametrize("third_s", [1, HOUR_S // 2, HOUR_S])
def test_a_lying_witness_of_three_decides_nothing_even_if_another_was_away(
    lie: tuple[float, int], third_s: int
) -> None:
    rows = [(100.0, HOUR_S), (100.0, third_s), lie]
    statements = {
        witness: Statement(1.0, "", 0, [seen(NAMES[0], per_s, met_s=met_s)])
        for witness, (per_s, met_s) in zip(NAMES[1:4], rows, strict=True)
    }
    found = of(PeerId(suffix(NAMES[0])), statements)
    assert found.tokens in (100 * third_s, 100 * HOUR_S)
    assert found.hours <= 1.0


def test_what_hops_carried_counts_where_no_windows_were_merged() -> None:
    statements = {
        NAMES[0]: Statement(1.0, "A", 0, [seen(LIAR, 0.0, met_s=0, carried=500)]),
        NAMES[1]: Statement(1.0, "B", 0, [seen(LIAR, 0.0, met_s=0, carried=700)]),
    }
    found = of(PeerId(suffix(LIAR)), statements)
    assert (found.tokens, found.witnesses) == (1000, 2)


def test_the_order_of_statements_does_not_matter() -> None:
    rows = [*swarm(per_s=150.0, explained=120.0).items()]
    expected = contributions(dict(rows))
    for seed in range(5):
        Random(seed).shuffle(rows)
        assert contributions(dict(rows)) == expected


def test_the_newest_statement_of_a_peer_counts() -> None:
    old, new = Statement(1.0, "old", 1), Statement(2.0, "new", 2)
    assert latest([(LIAR, new), (LIAR, old)]) == {LIAR: new}


def test_without_statements_there_are_no_contributions() -> None:
    assert contributions({}) == []
    (alone,) = contributions({LIAR: Statement(1.0, "F", 10**9)})
    assert (alone.tokens, alone.share, alone.witnesses) == (0, 0.0, 0)


@pytest.mark.parametrize("r", [0.1, 0.5, 1.0, 3.0, 10.0])
def test_tokens_of_an_honest_peer_are_explained_whether_its_steps_are_noise_or_all_alike(r: float) -> None:
    for times in (r, r**0.5):
        assert explained_tokens(100.0, times) >= 100.0 * r * 0.999
    assert explained_tokens(100.0, 1.0) == 100.0
    assert explained_tokens(1.0, 1e300) == credit.IMPLAUSIBLE_TIMES**2
