"""The record of each algorithm, held against its rule, its real blobs and its real tensors."""

import pytest
import torch
from torch import Tensor, nn

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Packer
from decentral.comm.gossip import snapshots, update_rules
from decentral.comm.gossip.outer_kernels import TorchKernels
from decentral.comm.gossip.update_rules import RuleTools, Window
from decentral.core import config, received
from decentral.core.choices import ALGORITHMS, Algorithm
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment, layout_bytes
from decentral.core.ids import PeerId
from decentral.engine.fragment import Live

SIDE = 128
HOLDERS = 3  # of a fragment, in a run with exact gradients
ROUNDS_KEPT = 2
TOOLS = RuleTools(blockwise, TorchKernels(blockwise))

RECORDS = [pytest.param(record, id=name) for name, record in ALGORITHMS.items()]
every_algorithm = pytest.mark.parametrize("algorithm", RECORDS)


def settings(algorithm: Algorithm) -> config.GossipConfig:
    return config.GossipConfig(algorithm=algorithm.name)


def rule_after_a_close(algorithm: Algorithm) -> tuple[update_rules.UpdateRule, int, int]:
    """A rule whose window waits for its merge, the bytes that it published, and how many parameters it has."""
    layer = nn.Linear(SIDE, SIDE, bias=False)
    live = Live(Fragment(0, 0, 1, SIDE * SIDE), [layer], torch.device("cpu"), config.TrainConfig())
    rule, packer = update_rules.rule(settings(algorithm), live.theta, PeerId("A"), TOOLS), Packer(blockwise)
    if algorithm.synchronous:
        rule.close_round(live, packer)
    else:
        theta = rule.buffer()
        live.copy_theta(theta)
        rule.close(theta, Window(0, 0), packer)
        rule.encode(packer, [section.name for section in rule.on_request])
    return rule, len(packer.finish()[1]), SIDE * SIDE


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, RuleTools):
        return []
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    names = getattr(value, "__slots__", None) or getattr(value, "__dict__", {})
    return [tensor for name in names for tensor in tensors_in(getattr(value, name))]


def test_a_name_that_is_not_in_the_table_loads_nothing_and_the_error_lists_those_that_are() -> None:
    *others, last = map(repr, ALGORITHMS)
    expected = f"gossip.algorithm must be {', '.join(others)} or {last}; it is 'os'"
    with pytest.raises(UserError, match=f"^config: {expected}$"):
        received.received('{"gossip": {"algorithm": "os"}}')


@pytest.mark.parametrize("value", ["3", "[pull]", "null", "{pull: 1}"])
def test_an_algorithm_that_is_no_text_is_refused_in_the_same_words(value: str) -> None:
    with pytest.raises(UserError, match=r"gossip\.algorithm must be 'pull', "):
        config.load(None, [f"gossip.algorithm={value}"])


@every_algorithm
def test_the_gossip_state_of_a_parameter_takes_no_more_than_the_record_says(algorithm: Algorithm) -> None:
    rule, published, parameters = rule_after_a_close(algorithm)
    copies = HOLDERS * ROUNDS_KEPT if algorithm.synchronous else snapshots.ROUNDS_KEPT if algorithm.blocking else 1
    held = sum(tensor.nbytes for tensor in tensors_in(rule)) + copies * published
    assert held <= algorithm.memory_bytes * parameters
    assert held >= 0.5 * algorithm.memory_bytes * parameters


@every_algorithm
def test_what_a_newcomer_gets_and_what_partners_get_are_those_of_the_rule(algorithm: Algorithm) -> None:
    rule, published, parameters = rule_after_a_close(algorithm)
    always = update_rules.layout_of(rule.sections, parameters, blockwise)
    assert published == layout_bytes((*always, *rule.on_request))
    assert not set(rule.sections) & {section.name for section in rule.on_request}
