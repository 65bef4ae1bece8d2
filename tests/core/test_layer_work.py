"""A token's time divides among a model's layers as a device has measured it, else by the layers' FLOPs."""

import pytest

from decentral.core.fragments import Fragment
from decentral.core.layer_work import (
    KindCost,
    KindCosts,
    forward_share,
    mean_shape,
    shape_of,
    share,
    token_seconds,
)

# An embedding, four blocks in two fragments, and a head that does half of the FLOPs.
CUTS = (
    Fragment(0, 0, 1, 400, (1.0, 0.0, 0.0)),
    Fragment(1, 1, 3, 100, (0.0, 250.0, 0.0)),
    Fragment(2, 3, 5, 100, (0.0, 250.0, 0.0)),
    Fragment(3, 5, 6, 400, (0.0, 0.0, 499.0)),
)
BLOCK = KindCost(0.25, 0.75, 1, 1)
MEASURED = KindCosts(KindCost(0.5, 0.5, 1, 1), BLOCK, KindCost(1.0, 4.0, 1, 1))


def test_without_measurements_layers_count_by_their_flops() -> None:
    assert shape_of(CUTS) == pytest.approx((0.001, 0.5, 0.499))
    assert share(CUTS, 1, 3) == pytest.approx(0.25)


def test_layers_whose_flops_are_unknown_count_by_their_parameters() -> None:
    cuts = [Fragment(one.index, one.first, one.last, one.parameters) for one in CUTS]
    assert share(cuts, 0, 1) == pytest.approx(0.4)
    assert share(cuts, 0, 1, MEASURED) == pytest.approx(0.4)


def test_measured_layers_count_by_their_seconds() -> None:
    assert shape_of(CUTS, MEASURED) == pytest.approx((0.1, 0.4, 0.5))
    assert [share(CUTS, cut.first, cut.last, MEASURED) for cut in CUTS] == pytest.approx([0.1, 0.2, 0.2, 0.5])
    assert token_seconds(CUTS, MEASURED) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("costs", "shape", "seconds"),
    [
        pytest.param(KindCosts(block=BLOCK), (0.001, 0.5, 0.499), 8.0, id="only a block"),
        pytest.param(KindCosts(head=KindCost(1.0, 2.992, 1, 1)), (0.001, 0.5, 0.499), 8.0, id="only the head"),
        pytest.param(KindCosts(embedding=BLOCK), (0.001, 0.5, 0.499), 0.0, id="only the embedding"),
        pytest.param(KindCosts(embedding=KindCost(1.0, 1.0, 1, 1), block=BLOCK), (0.2, 0.4, 0.4), 10.0, id="no head"),
    ],
)
def test_a_kind_that_is_not_measured_takes_the_time_of_its_flops(
    costs: KindCosts, shape: tuple[float, float, float], seconds: float
) -> None:
    assert shape_of(CUTS, costs) == pytest.approx(shape, abs=0.001)
    assert token_seconds(CUTS, costs) == pytest.approx(seconds, rel=0.002)


def test_the_forward_job_takes_its_measured_part_and_at_the_models_end_both_passes() -> None:
    assert forward_share(CUTS, 1, 3, MEASURED) == pytest.approx(0.2 / 4)
    assert forward_share(CUTS, 0, 3, MEASURED) == pytest.approx(0.1 / 2 + 0.2 / 4)
    assert forward_share(CUTS, 1, 3) == pytest.approx(0.25 / 3)
    assert forward_share(CUTS, 3, 6, MEASURED) == pytest.approx(0.7)


@pytest.mark.parametrize("seconds", [1e-12, 1e4])
def test_a_kind_that_takes_nearly_no_time_or_all_of_it_leaves_each_kind_a_share(seconds: float) -> None:
    found = shape_of(CUTS, KindCosts(KindCost(seconds, seconds, 1, 1), BLOCK, BLOCK))
    assert sum(found) == pytest.approx(1.0)
    assert min(found) > 0


def test_the_mean_of_shapes_is_weighted_and_of_no_weights_it_is_plain() -> None:
    shapes = (0.0, 1.0, 0.0), (0.0, 0.5, 0.5)
    assert mean_shape(list(zip((3.0, 1.0), shapes, strict=True))) == pytest.approx((0.0, 0.875, 0.125))
    assert mean_shape(list(zip((0.0, 0.0), shapes, strict=True))) == pytest.approx((0.0, 0.75, 0.25))
