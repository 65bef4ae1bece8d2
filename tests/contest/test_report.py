"""The contest's tables, from runs by hand: medians, who wins, and contestants that never reach or never begin."""

from typing import Any

from benchmarks.contest.report import BEGIN, END, replaced, rows_of, table, target_of, verdicts

CHURN, EQUAL = "household/churn", "household/equal"


def run(name: str, losses: list[float], scenario: str = EQUAL, repetition: int = 0, **others: Any) -> dict[str, Any]:
    """A run whose loss was measured every 10 s, with 100 tokens/s."""
    points = [{"seconds": 10.0 * n, "tokens": 1000 * n, "loss": loss} for n, loss in enumerate(losses, start=1)]
    return {
        "contestant": name,
        "scenario": scenario,
        "repetition": repetition,
        "seconds": 10.0 * len(losses),
        "curve": points,
        "smoothed": losses[-1],
        "tokens": 1000 * len(losses),
        "training_share": 0.9,
        "all_train_s": 2.0,
        "start_s": 7.0,
        "bytes": 5000 * len(losses),
        "survival": {"killed": 0, "newcomers_trained": 0, "longest_gap_s": 1.0},
        **others,
    }


def test_the_target_is_the_median_of_what_one_peer_alone_has_at_its_end() -> None:
    runs = [run("alone", [3.0, last], repetition=number) for number, last in enumerate((2.0, 2.2, 2.1))]
    assert target_of(runs, CHURN) == 2.1
    assert target_of(runs, "eight-cities/churn") is None


def test_a_table_has_medians_and_how_much_sooner_ours_is() -> None:
    runs = [run("ours", [2.0, 1.5, 1.0]), run("gloo", [3.0, 2.5, 2.0])]
    text = table(rows_of(runs, 2.0))
    assert "| **ours** | 10.0 (10.0-10.0) |  | 17.0 | 1.000" in text
    assert "| gloo | 30.0 (30.0-30.0) | 3.00 | 37.0 |" in text
    assert "| 100 | 0.90 | 5 | 2.0 | 1 s |" in text


def test_one_that_never_reaches_is_called_so_and_bounds_the_ratio() -> None:
    text = table(rows_of([run("ours", [2.0, 1.5, 1.0]), run("gloo", [3.0, 2.9, 2.8])], 2.0))
    assert "| gloo | never, 1 of 1 not | > 3.00 |" in text


def test_one_that_could_not_begin_is_in_the_table_with_its_error() -> None:
    error = {"contestant": "torchft", "scenario": EQUAL, "repetition": 0, "seconds": 30.0, "error": "no such device"}
    text = table(rows_of([run("ours", [2.0, 1.5, 1.0]), error], 2.0))
    assert "| torchft | never, 1 of 1 not |" in text
    assert "torchft could not begin: no such device" in text


def test_a_peer_that_ended_by_itself_is_named_under_the_table() -> None:
    broken = run("gloo", [3.0, 2.5, 2.0], ended={"1-0": "Connection reset"})
    assert "A peer of gloo ended by itself: 1-0 (Connection reset)" in table(rows_of([broken], 2.0))


def test_a_lone_peer_that_could_not_begin_sets_no_target() -> None:
    error = {"contestant": "alone", "scenario": EQUAL, "repetition": 1, "seconds": 30.0, "error": "no"}
    assert target_of([run("alone", [3.0, 2.0]), error], EQUAL) == 2.0
    assert target_of([error], EQUAL) is None


def test_who_is_sooner_from_the_command_on_is_named() -> None:
    ours, other = run("ours", [2.0, 1.0], start_s=30.0, all_train_s=3.0), run("gloo", [2.5, 2.0], start_s=1.0)
    said = verdicts(rows_of([ours, other], 2.0), EQUAL)[1]
    assert "time from the command (ours 40.0): gloo 21.0" in said
    assert "time until all train (ours 3.0): gloo 2.0" in said


def test_the_goal_with_equal_peers_is_to_be_as_soon_and_twice_as_soon_elsewhere() -> None:
    ours, other = [2.6, 2.0, 1.5, 1.0], [2.7, 2.3, 2.0, 1.2]
    equal = verdicts(rows_of([run("ours", ours), run("gloo", other)], 2.0), EQUAL)
    churn = verdicts(rows_of([run("ours", ours), run("gloo", other)], 2.0), CHURN)
    assert "**met**" in equal[0]
    assert "**not met**: gloo: ours 1.50 times as soon" in churn[0]


def test_a_run_too_short_for_the_goal_names_whoever_never_reached_the_target() -> None:
    ours, other = run("ours", [2.6, 2.4, 2.0]), run("gloo", [2.7, 2.6, 2.5])
    goal = verdicts(rows_of([ours, other], 2.0), CHURN)[0]
    assert "**not met**. The run was too short to show it against those that never got there: gloo." in goal


def test_a_contestant_that_wins_is_named_with_both_figures() -> None:
    rows = rows_of([run("ours", [2.6, 2.0, 1.5]), run("gloo", [2.0, 1.6, 1.4])], 2.0)
    _, wins = verdicts(rows, EQUAL)
    assert "time to the target (ours 20.0): gloo 10.0" in wins
    assert "loss at the end (ours 1.500): gloo 1.400" in wins


def test_ours_that_never_reaches_loses_to_who_does() -> None:
    rows = rows_of([run("ours", [2.6, 2.5]), run("gloo", [2.6, 1.9])], 2.0)
    goal, wins = verdicts(rows, CHURN)
    assert "ours never reached the target" in goal
    assert "(ours never)" in wins


def test_losses_at_equal_tokens_are_those_at_the_end_of_the_slowest_swarm() -> None:
    fast = run("ours", [2.0, 1.5, 1.0])
    slow = run("gloo", [3.0, 2.5])
    rows = {row.name: row for row in rows_of([fast, slow, run("alone", [2.0])], 2.0)}
    assert rows["ours"].at_tokens.middle == 1.5


def test_newcomers_are_counted_over_all_repetitions() -> None:
    survived = {"killed": 2, "newcomers_trained": 1, "longest_gap_s": 4.0}
    runs = [run("ours", [2.0], repetition=number, survival=survived) for number in range(2)]
    assert rows_of(runs, 1.0)[0].survival == "2/4, 4 s"


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    document = f"# Title\n\n{BEGIN}\nold\n{END}\n\n## Findings\n"
    assert replaced(document, "new") == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\n## Findings\n"
