"""Topology files: what is read, and what is refused in one clear line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from decentral.core.errors import UserError
from decentral.core.layer_work import KindCost, KindCosts
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.topology_file import LinkForm, TopologyFile

PEERS = [{"id": "a", "region": "x"}, {"id": "b", "region": "y"}]
FULL = {"peers": PEERS, "delay_ms": [[0, 10], [20, 0]], "bandwidth_gbps": [[0, 8], [1, 0]]}


def test_full_matrices_keep_both_directions() -> None:
    read = topology.parse(FULL)
    assert read.delay_s[0, 1] == pytest.approx(0.010)
    assert read.delay_s[1, 0] == pytest.approx(0.020)
    assert read.bandwidth[0, 1] == pytest.approx(1e9)
    assert np.isinf(read.bandwidth[0, 0])


@pytest.mark.parametrize("name", ["data-centre", "spot", "universities", "four-regions", "eight-cities"])
def test_published_cases_have_64_v100(name: str) -> None:
    read = topology.load(name)
    assert len(read) == 64
    assert set(read.devices) == {"V100"}


def test_json_and_yaml_give_the_same_digest(tmp_path: Path) -> None:
    import json

    (tmp_path / "a.json").write_text(json.dumps(FULL))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(FULL))
    assert topology.load(tmp_path / "a.json").digest() == topology.load(tmp_path / "a.yaml").digest()


def test_ten_cities_lend_their_links() -> None:
    read = topology.parse(
        {"peers": [{"id": "a", "region": "Tokyo"}, {"id": "b", "region": "Sydney"}], "based_on": "ten-cities"}
    )
    assert read.delay_s[0, 1] == pytest.approx(0.100)
    assert read.bandwidth[0, 1] == pytest.approx(0.761e9 / 8)


LAYERS = {"block": {"forward_us": 2, "backward_us": 4, "activation_kb": 1.5, "state_mb": 3}}
HERE = {"inside": {"delay_ms": 1, "bandwidth_gbps": 1}}


def test_measured_layers_are_read_for_the_peers_that_have_them() -> None:
    read = topology.parse({"peers": [{"id": "a", "layers": LAYERS}, {"id": "b"}], **HERE})
    assert read.costs == (KindCosts(block=KindCost(2e-6, 4e-6, 1500, 3_000_000)), KindCosts())
    assert topology.among(read, [1, 0]).costs == read.costs[::-1]
    without = topology.parse({"peers": [{"id": "a"}, {"id": "b"}], **HERE})
    assert without.costs == ()
    assert without.digest() != read.digest()


@pytest.mark.parametrize("figure", [0, -1, float("nan"), float("inf"), 1e300, "much"])
def test_a_layer_whose_time_no_device_takes_is_refused(figure: object) -> None:
    layers = {"head": {"forward_us": figure, "backward_us": 1}}
    with pytest.raises(UserError, match=r"peers\.0\.layers\.head\.forward_us must be"):
        topology.parse({"peers": [{"id": "a", "layers": layers}, {"id": "b"}], **HERE})


def test_uplinks_and_downlinks_bound_each_pair_and_are_kept() -> None:
    peers = [{"id": "home", "region": "x", "up_gbps": 0.02, "down_gbps": 0.1}, {"id": "rack", "region": "x"}]
    read = topology.parse({"peers": peers, "inside": {"delay_ms": 10, "bandwidth_gbps": 1, "loss": 0.001}})
    assert read.up.tolist() == [pytest.approx(2.5e6), np.inf]
    assert read.down.tolist() == [pytest.approx(12.5e6), np.inf]
    assert read.bandwidth[0, 1] == pytest.approx(2.5e6)
    assert read.bandwidth[1, 0] == pytest.approx(12.5e6)
    assert read.loss.tolist() == [[0, 0.001], [0.001, 0]]


def test_links_may_lose_packets_and_matrices_too() -> None:
    link = {"between": ["x", "y"], "delay_ms": 1, "bandwidth_gbps": 1, "loss": 0.01}
    assert topology.parse({"peers": PEERS, "links": [link]}).loss[0, 1] == pytest.approx(0.01)
    assert topology.parse({**FULL, "loss": [[0, 0.1], [0.2, 0]]}).loss.tolist() == [[0, 0.1], [0.2, 0]]
    assert not topology.parse(FULL).loss.any()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**FULL, "delay_ms": [[0, 1]]}, "delay_ms of 2 x 2 numbers"),
    ({**FULL, "bandwidth_gbps": [[0, 0], [1, 0]]}, "bandwidth_gbps above 0"),
    ({**FULL, "bandwidth_gbps": None}, "or neither"),
    ({**FULL, "loss": [[0, 1], [0, 0]]}, "loss at least 0 and below 1"),
    ({"peers": PEERS, "loss": [[0, 0], [0, 0]]}, "loss needs delay_ms"),
    ({"peers": [{"id": "a", "up_gbps": 0}, {"id": "b"}]}, "greater than 0"),
    ({"peers": PEERS, "links": [{"between": ["x", "z"], "delay_ms": 1, "bandwidth_gbps": 1}]}, "unknown region z"),
    ({"peers": PEERS, "links": [{"between": ["x", "y"], "delay_ms": 1, "bandwidth_gbps": 0}]}, "greater than 0"),
    ({"peers": PEERS}, "no link between x and y"),
    ({"peers": PEERS[:1]}, "at least 2 peers"),
    ({"peers": [PEERS[0], PEERS[0]], "across": {"delay_ms": 1, "bandwidth_gbps": 1}}, "every peer id once"),
    ({"regoins": {}}, "unknown key regoins"),
]


@pytest.mark.parametrize(("tree", "line"), REFUSED)
def test_bad_input_is_one_clear_line(tree: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as refused:
        topology.parse(tree)
    assert "\n" not in str(refused.value)


def test_each_property_of_links_has_its_key_in_each_form_of_a_file() -> None:
    keys = {one.key for one in topology.LINK_PROPERTIES.values()}
    assert (*topology.LINK_PROPERTIES,) == topology.LinkMatrices._fields
    assert keys == {*LinkForm.model_fields} <= {*TopologyFile.model_fields}


def test_a_missing_file_names_the_shipped_ones() -> None:
    with pytest.raises(UserError, match=r"shipped topology: .*eight-cities"):
        topology.load("nowhere")


def test_profiles_of_a_live_swarm_become_a_topology() -> None:
    profiles = {
        "b": {
            "region": "y",
            "device": "T4",
            "memory_bytes": 16e9,
            "flops": 8e12,
            "up": 1e6,
            "down": 2e6,
            "latency_s": 0.1,
        },
        "a": {"region": "x", "flops": 1e12},
    }
    read = topology.topology_from_profiles(profiles, {("a", "b"): (0.03, 5e6), ("a", "gone"): (1.0, 1.0)})
    assert read.ids == ("a", "b")
    assert read.bandwidth[0, 1] == 5e6
    assert read.bandwidth[1, 0] == 1e6
    assert read.delay_s[1, 0] == pytest.approx(0.15)
    assert read.flops[1] == 8e12
