"""Tables of positions: whatever a config that is accepted says, they can be computed and are finite."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentral.core import config
from decentral.core.errors import UserError
from decentral.train import rotary

KINDS = ("linear", "llama3", "yarn")
NUMBERS = st.sampled_from([5e-324, 1e-9, 1.0, 1.0 + 2**-52, 2.0, 4.0, 32.0, 1e4, 1e12]) | st.floats(5e-324, 1e12)
SCALINGS = st.fixed_dictionaries(
    {"kind": st.sampled_from(KINDS), "factor": st.floats(1, 1e6)},
    optional={
        "positions": st.integers(1, 1 << 20),
        "low": NUMBERS,
        "high": NUMBERS,
        "attention": NUMBERS,
        "truncate": st.booleans(),
    },
)


@given(NUMBERS, st.none() | SCALINGS)
def test_tables_of_an_accepted_config_are_finite(theta: float, scaling: dict[str, object] | None) -> None:
    tree = {"model": {"width": 64, "context": 16, "rope_theta": theta, "rope_scaling": scaling}}
    try:
        model = config.validated(tree).model
    except UserError:
        return
    for table_TE in rotary.tables(model):
        assert torch.isfinite(table_TE).all()


@pytest.mark.parametrize("kind", KINDS)
def test_usual_ones_are_accepted(kind: str) -> None:
    scaling = {"kind": kind, "factor": 8.0, "low": 1.0, "high": 4.0}
    model = config.validated({"model": {"rope_theta": 5e5, "rope_scaling": scaling}}).model
    assert model.rope_scaling is not None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"rope_theta": 1.0, "rope_scaling": {"kind": "yarn", "factor": 4.0}}, "rope_theta"),
        ({"rope_theta": 1e-300}, "rope_theta"),
        ({"rope_scaling": {"kind": "llama3", "factor": 4.0, "low": 4.0, "high": 4.0}}, "low"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(model: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config.validated({"model": model})
