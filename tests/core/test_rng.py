"""Named streams of chance: the same on every machine, independent of each other."""

from decentral.core import rng


def test_the_same_names_give_the_same_stream() -> None:
    one, other = rng.stream(7, "partner", 3), rng.stream(7, "partner", 3)
    assert [one.random() for _ in range(5)] == [other.random() for _ in range(5)]


def test_other_names_give_another_stream() -> None:
    seeds = [
        rng.seed_of(7, "a"),
        rng.seed_of(7, "b"),
        rng.seed_of(8, "a"),
        rng.seed_of(7, "a", 0),
        rng.seed_of(7, "a", 1),
    ]
    assert len(set(seeds)) == 5


def test_drawing_from_one_stream_leaves_the_others_alone() -> None:
    undisturbed = rng.stream(7, "b").random()
    rng.stream(7, "a").random()
    assert rng.stream(7, "b").random() == undisturbed


def test_arrays_with_the_same_names_are_the_same() -> None:
    assert (rng.arrays(7, "x").random(9) == rng.arrays(7, "x").random(9)).all()


def test_a_seed_is_the_same_in_every_python() -> None:
    assert rng.seed_of(0, "a") == 13225716355254514689
