"""Of what others make grow the latest entries stay."""

from decentral.core.latest import keep_latest


def test_the_entry_that_was_set_longest_ago_goes_first_and_one_set_again_counts_as_new() -> None:
    entries: dict[str, int] = {}
    for number, key in enumerate("ABCAD"):
        keep_latest(entries, key, number, 3)
    assert entries == {"C": 2, "A": 3, "D": 4}
    assert list(entries) == ["C", "A", "D"]
