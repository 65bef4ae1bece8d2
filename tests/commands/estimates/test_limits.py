"""What is said to limit a swarm: the resource of which twice as much would give the most tokens/s."""

from dataclasses import replace

import pytest

from decentral.commands.estimates import limits
from decentral.commands.estimates.estimating import EstimatedSwarm, swarm_of
from decentral.commands.estimates.places import groups_of
from decentral.commands.estimates.sizes import with_shape
from decentral.core import config
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology


def swarm(size: str, peers: str) -> tuple[EstimatedSwarm, Topology]:
    found = swarm_of(with_shape(config.load(None), size, frozenset()), groups_of(peers))
    assert found.topology is not None
    return found, replace(found.topology, costs=tuple(one.costs for one in found.each))


def limit(size: str, peers: str) -> str:
    found, topology = swarm(size, peers)
    plan = throughput_plan(topology, found.run, "genetic", 0, SearchBudget(0.6))
    spans = [(first, last) for first, last in (plan.spans.get(name, (0, 0)) for name in topology.ids)]
    return limits.of_routes(plan, topology, found.run, found.each, spans, plan.throughput["estimated"])


def test_homes_whose_plan_uses_no_link_up_are_limited_by_their_uplinks() -> None:
    """The plan uses only 78% of the uplinks, because steps wait for micro-batches; faster links shorten the waits."""
    said = limit("3B", "4x4090 homes:50/500")
    assert said.startswith("uplink: 2.1 times the tokens/s with twice the uplink, ")
    assert "with twice the memory; 17 times if each peer held the whole model" in said
    assert said.endswith("so micro-batches travel")


def test_cards_of_one_lab_are_limited_by_their_compute() -> None:
    assert limit("3B", "4xA100 lab").startswith("compute: ")


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ({"uplink": 1.0, "memory": 3.0, "compute": 1.5}, "memory: 3 times the tokens/s with twice the memory, "),
        ({"uplink": 1.02, "memory": 1.0, "compute": 1.01}, "no resource alone: 1 times the tokens/s with twice the up"),
    ],
)
def test_the_resource_that_gives_most_is_named_first(gains: dict[str, float], said: str) -> None:
    assert limits.named(gains).startswith(said)


def test_peers_that_hold_the_whole_model_are_limited_by_compute_unless_memory_would_add_many() -> None:
    for peers, holders, said in (
        ("4x4090 lab", [0, 1, 2, 3], "compute: each peer holds the whole model"),
        ("8xA100 lab, 4090 home", list(range(8)), "compute: 2 times the tokens/s with twice the compute, 1.1 with"),
        ("A100 lab, 4x4090 home", [0], "memory: 3.1 times the tokens/s with twice the memory, 2 with twice the c"),
    ):
        assert limits.of_whole_models(swarm("3B", peers)[0].each, holders).startswith(said)
