"""The record of each algorithm, held against its rule, its real blobs and its real tensors."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import decentral.algorithms
from decentral.comm.gossip.snapshots import SNAPSHOTS_KEPT
from decentral.core import config, swarm_config
from decentral.core.choices import ALGORITHMS, Algorithm
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.train import compress, update_rules
from decentral.train.inner import Live
from decentral.train.outer_kernels import TorchKernels
from decentral.train.sections import Packer
from decentral.train.update_rules import RuleTools, Window

SIDE = 128
HOLDERS = 3  # of a fragment, in a run with exact gradients
ROUNDS_KEPT = 2
TOOLS = RuleTools(compress, TorchKernels(compress))

RECORDS = [pytest.param(record, id=name) for name, record in ALGORITHMS.items()]
every_algorithm = pytest.mark.parametrize("algorithm", RECORDS)


def settings(algorithm: Algorithm) -> config.GossipConfig:
    return config.GossipConfig(algorithm=algorithm.name)


def rule_after_a_close(algorithm: Algorithm) -> tuple[update_rules.UpdateRule, int, int]:
    """A rule whose window waits for its merge, the bytes that it published, and how many parameters it has."""
    layer = nn.Linear(SIDE, SIDE, bias=False)
    live = Live(Fragment(0, 0, 1, SIDE * SIDE), [layer], torch.device("cpu"), config.TrainConfig())
    rule, packer = update_rules.rule(settings(algorithm), live.theta, PeerId("A"), TOOLS), Packer(compress)
    if algorithm.exact:
        rule.close_round(live, packer)
    else:
        theta = rule.buffer()
        live.copy_theta(theta)
        rule.close(theta, Window(0, 0.0, 0), packer)
        rule.encode(packer)
    return rule, len(packer.finish()[1]), SIDE * SIDE


def sections(rule: update_rules.UpdateRule) -> dict[str, str]:
    """All that partners may get of a window."""
    return {**rule.sections, **rule.on_request}


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, RuleTools):
        return []
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    names = getattr(value, "__slots__", None) or getattr(value, "__dict__", {})
    return [tensor for name in names for tensor in tensors_in(getattr(value, name))]


def test_every_module_of_the_folder_is_in_the_table_under_its_own_name() -> None:
    folder = Path(decentral.algorithms.__file__ or "").parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {record.rule.split(":")[0] for record in ALGORITHMS.values()} == {
        f"decentral.algorithms.{name}" for name in modules
    }
    assert modules == set(ALGORITHMS)


def test_a_name_that_is_not_in_the_table_loads_nothing_and_the_error_lists_those_that_are() -> None:
    *others, last = map(repr, ALGORITHMS)
    expected = f"gossip.algorithm must be {', '.join(others)} or {last}; it is 'os'"
    with pytest.raises(UserError, match=f"^config: {expected}$"):
        swarm_config.received('{"gossip": {"algorithm": "os"}}')


@pytest.mark.parametrize("value", ["3", "[pull]", "null", "{pull: 1}"])
def test_an_algorithm_that_is_no_text_is_refused_in_the_same_words(value: str) -> None:
    with pytest.raises(UserError, match=r"gossip\.algorithm must be 'pull', "):
        config.load(None, [f"gossip.algorithm={value}"])


@every_algorithm
def test_the_gossip_state_of_a_parameter_takes_no_more_than_the_record_says(algorithm: Algorithm) -> None:
    rule, published, parameters = rule_after_a_close(algorithm)
    copies = HOLDERS * ROUNDS_KEPT if algorithm.exact else SNAPSHOTS_KEPT
    held = sum(tensor.nbytes for tensor in tensors_in(rule)) + copies * published
    assert held <= algorithm.memory_bytes * parameters
    assert held >= 0.5 * algorithm.memory_bytes * parameters


@every_algorithm
def test_what_a_newcomer_gets_and_what_partners_get_are_those_of_the_rule(algorithm: Algorithm) -> None:
    rule, published, parameters = rule_after_a_close(algorithm)
    assert published == sum(one.size for one in update_rules.layout_of(sections(rule), parameters, compress))
    assert not set(rule.sections) & set(rule.on_request)
    assert set(algorithm.light) <= set(rule.sections)
