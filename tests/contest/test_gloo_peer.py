"""The algorithms of the contestants over gloo, without a network."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.contest.gloo_peer import inner_steps, outer_step


def test_the_outer_step_of_diloco_is_that_of_torch_with_nesterov_momentum() -> None:
    shared, momentum = torch.linspace(-1, 1, 50), torch.zeros(50)
    theirs = nn.Parameter(shared.clone())
    torchs = torch.optim.SGD([theirs], lr=0.7, momentum=0.6, nesterov=True)
    chance = torch.Generator().manual_seed(0)
    for _ in range(4):
        theirs.grad = torch.randn(50, generator=chance)
        outer_step(shared, momentum, theirs.grad, {"outer_rate": 0.7, "outer_momentum": 0.6})
        torchs.step()
    torch.testing.assert_close(shared, theirs.detach())


@pytest.mark.parametrize(
    ("options", "throttle", "expected"),
    [
        ({"inner_steps": 20}, 4.0, 20),
        ({"inner_s": 3.0}, 1.0, 20),
        ({"inner_s": 3.0}, 4.0, 5),
        ({"inner_s": 0.1}, 4.0, 1),
    ],
)
def test_a_round_by_time_has_fewer_inner_steps_on_a_slower_device(
    options: dict[str, Any], throttle: float, expected: int
) -> None:
    taken: list[str] = []
    peer: Any = SimpleNamespace(
        run=SimpleNamespace(train=SimpleNamespace(emulated_micro_batch_s=0.15)),
        setup=SimpleNamespace(throttle=throttle),
        gradient=lambda: taken.append("gradient"),
        apply=lambda: taken.append("step"),
    )
    inner_steps(peer, options)
    assert taken == ["gradient", "step"] * expected
