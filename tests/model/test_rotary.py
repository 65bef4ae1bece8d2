"""Tables of positions: whatever a config that is accepted says, they can be computed and are finite."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from decentral.core import config
from decentral.core.errors import UserError
from decentral.model import decoder, rotary

KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
NUMBERS = st.sampled_from([5e-324, 1e-9, 1.0, 1.0 + 2**-52, 2.0, 4.0, 32.0, 1e4, 1e12]) | st.floats(5e-324, 1e12)
SCALINGS = st.fixed_dictionaries(
    {"kind": st.sampled_from(KINDS), "factor": st.floats(1, 1e6)},
    optional={
        "positions": st.integers(1, 1 << 20),
        "low": NUMBERS,
        "high": NUMBERS,
        "attention": NUMBERS,
        "truncate": st.booleans(),
        "short": st.lists(NUMBERS, min_size=16, max_size=16),
        "long": st.lists(NUMBERS, min_size=16, max_size=16),
    },
)


@given(NUMBERS, st.none() | SCALINGS)
@example(1e12, {"kind": "dynamic", "factor": 1e6, "positions": 2})
@example(2.0, {"kind": "longrope", "factor": 1e6, "positions": 2, "short": [1e-3] * 16, "long": [1e6] * 16})
def test_tables_of_an_accepted_config_are_finite(theta: float, scaling: dict[str, object] | None) -> None:
    tree = {"model": {"width": 64, "context": 16, "rope_theta": theta, "rope_scaling": scaling}}
    try:
        model = config.validated(tree).model
    except UserError:
        return
    for table_TE in rotary.tables(model, model.context):
        assert torch.isfinite(table_TE).all()


@pytest.mark.parametrize("kind", KINDS)
def test_usual_ones_are_accepted(kind: str) -> None:
    divisors = {"short": [1.0] * 16, "long": [2.0] * 16} if kind == "longrope" else {}
    scaling = {"kind": kind, "factor": 8.0, "low": 1.0, "high": 4.0, **divisors}
    model = config.validated({"model": {"rope_theta": 5e5, "rope_scaling": scaling}}).model
    assert model.rope_scaling is not None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"rope_theta": 1.0, "rope_scaling": {"kind": "yarn", "factor": 4.0}}, "rope_theta"),
        ({"rope_theta": 1e-300}, "rope_theta"),
        ({"rope_scaling": {"kind": "llama3", "factor": 4.0, "low": 4.0, "high": 4.0}}, "low"),
        ({"rope_scaling": {"kind": "longrope", "factor": 4.0}}, "short and long"),
        ({"rope_scaling": {"kind": "longrope", "factor": 4.0, "short": [1.0], "long": [1.0]}}, "long has 1 numbers"),
        ({"rope_scaling": {"kind": "linear", "factor": 4.0, "short": [1.0], "long": [1.0]}}, "short and long"),
        ({"block": {"attention_multiplier": 2.0}}, "family llama does not support block.attention_multiplier"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(model: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config.validated({"model": model})


def test_a_kind_that_a_user_writes_has_its_papers_numbers() -> None:
    yarn = config.validated({"model": {"context": 64, "rope_scaling": {"kind": "yarn", "factor": 4.0}}}).model
    assert yarn.rope_scaling is not None
    assert (yarn.rope_scaling.low, yarn.rope_scaling.high) == (1.0, 32.0)
    whole = yarn.model_copy(update={"rope_scaling": yarn.rope_scaling.model_copy(update={"positions": 64})})
    assert all(map(torch.equal, rotary.tables(yarn, 64), rotary.tables(whole, 64)))


def test_blocks_share_one_pair_of_tables() -> None:
    blocks = [layer for layer in decoder.build(config.ModelConfig(depth=2), 0) if isinstance(layer, decoder.Block)]
    assert len({block.self_attn.cos_TE.data_ptr() for block in blocks}) == 1
