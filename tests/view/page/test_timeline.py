"""Series on one grid: means and totals, and a grid that gets coarser instead of longer."""

from decentral.view.page.timeline import BUCKETS, Timeline


def values(timeline: Timeline, name: str) -> list[float | None]:
    found: list[float | None] = timeline.since(0, [name])["series"][name]
    return found


def test_a_bucket_has_the_mean_of_what_fell_into_it() -> None:
    timeline = Timeline()
    for t, loss in ((100.0, 3.0), (100.4, 1.0), (102.0, 5.0)):
        timeline.put("loss", t, loss)
    assert values(timeline, "loss") == [2.0, None, 5.0]


def test_of_a_total_a_bucket_has_the_last_value() -> None:
    timeline = Timeline()
    for t, tokens in ((0.0, 10.0), (0.5, 20.0), (1.0, 30.0)):
        timeline.put("tokens", t, tokens, total=True)
    assert values(timeline, "tokens") == [20.0, 30.0]


def test_a_grid_that_is_full_gets_coarser_and_keeps_means_and_totals() -> None:
    timeline = Timeline()
    for t in range(BUCKETS + 1):
        timeline.put("loss", t, float(t % 2))
        timeline.put("tokens", t, t, total=True)
    assert timeline.width_s == 2.0
    assert timeline.length == BUCKETS // 2 + 1
    assert values(timeline, "loss")[:3] == [0.5, 0.5, 0.5]
    assert values(timeline, "tokens")[:3] == [1.0, 3.0, 5.0]


def test_a_clock_that_jumps_by_years_leaves_a_grid_of_the_same_size() -> None:
    timeline = Timeline()
    timeline.put("loss", 0.0, 1.0)
    timeline.put("loss", 1e11, 2.0)
    assert timeline.length <= BUCKETS
    assert values(timeline, "loss")[0] == 1.0
    assert values(timeline, "loss")[-1] == 2.0


def test_a_value_from_before_the_beginning_counts_in_the_first_bucket() -> None:
    timeline = Timeline()
    timeline.put("loss", 50.0, 1.0)
    timeline.put("loss", 20.0, 3.0)
    assert values(timeline, "loss") == [2.0]


def test_changes_begin_at_the_first_bucket_that_changed() -> None:
    timeline = Timeline()
    for t in range(10):
        timeline.put("loss", t, 1.0)
    timeline.settle()
    timeline.put("loss", 9.5, 2.0)
    timeline.put("loss", 10.0, 3.0)
    assert timeline.since(timeline.changed, ["loss"])["series"]["loss"] == [1.5, 3.0]
    timeline.settle()
    timeline.put("loss", 4.0, 7.0)  # a line that comes late
    assert timeline.changed == 4


def test_after_the_grid_got_coarser_all_of_it_is_new() -> None:
    timeline = Timeline()
    timeline.put("loss", 0.0, 1.0)
    timeline.settle()
    timeline.put("loss", float(BUCKETS), 1.0)
    assert timeline.changed == 0


def test_a_series_that_is_not_there_has_empty_buckets() -> None:
    timeline = Timeline()
    timeline.put("loss", 0.0, 1.0)
    timeline.put("loss", 2.0, 1.0)
    assert values(timeline, "other") == [None, None, None]
