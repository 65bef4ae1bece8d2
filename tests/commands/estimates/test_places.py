"""The peers that `--peers` describes, and the topology that they form."""

import numpy as np
import pytest

from decentral.commands.estimates.cards import card, cards
from decentral.commands.estimates.places import MBIT, groups_of, notes_on_places, topology_of
from decentral.core.errors import UserError


def test_a_group_has_a_count_a_device_and_a_place_with_its_link() -> None:
    one, other = groups_of("4x4090 home:50/500, 8xA100 oregon")
    assert (one.count, one.device, one.place.name) == (4, "4090", "home")
    assert (one.place.up, one.place.down, one.place.assumed) == (50 * MBIT, 500 * MBIT, False)
    assert (other.count, other.device, other.place.name, other.place.assumed) == (8, "A100", "oregon", True)


@pytest.mark.parametrize(
    ("text", "device", "place"),
    [
        ("RTX 4090", "RTX 4090", "here"),
        ("2x RTX 4070 Ti Super porto", "RTX 4070 Ti Super", "porto"),
        ("A100 80GB", "A100 80GB", "here"),
        ("8xA100-SXM4-80GB oregon", "A100-SXM4-80GB", "oregon"),
        ("A100 80 GB", "A100 80 GB", "here"),
        ("H100 80GB HBM3", "H100 80GB HBM3", "here"),
        ("cpu lab1", "cpu", "lab1"),
        ("RTX 6000 Ada lab", "RTX 6000 Ada", "lab"),
    ],
)
def test_a_device_may_have_several_words_and_the_place_may_be_missing(text: str, device: str, place: str) -> None:
    (group,) = groups_of(text)
    assert (group.device, group.place.name) == (device, place)


@pytest.mark.parametrize("rates", ["50Mb/s/0.5Gb/s", "50/500Mb/s", "50Mb/s/500", "50Mbit/s/500Mbps"])
def test_rates_may_have_a_unit_with_a_slash(rates: str) -> None:
    (group,) = groups_of(f"4x4090 home:{rates}")
    assert (group.place.up, group.place.down) == (50 * MBIT, 500 * MBIT)


@pytest.mark.parametrize("text", ["4x4090 home", "4*4090 home", "4 X 4090 home", "4\u00d74090 home"])
def test_a_count_stands_before_the_device(text: str) -> None:
    (group,) = groups_of(text)
    assert (group.count, group.device, group.place.name) == (4, "4090", "home")


def test_each_peer_in_homes_has_a_link_of_its_own() -> None:
    topology = topology_of(groups_of("2x4090 homes:50/500, 3090 homes, A100 home"), [24.0, 24.0, 40.0], [1.0] * 3)
    assert not topology.sites
    assert topology.ids == ("homes-1-1", "homes-2-1", "homes-3-1", "home-1")
    assert topology.up.tolist() == [50 * MBIT] * 3 + [20 * MBIT]
    assert np.allclose(topology.delay_s[0], [0, 30e-3, 30e-3, 30e-3])


def test_machines_that_share_a_home_are_pointed_out() -> None:
    shared = groups_of("3x4090 home:50/500, 3090 home, 8xA100 oregon, 2x4090 homes")
    said = "4 machines share the place home and its link; in separate homes: 3x4090 homes:50/500"
    assert notes_on_places(shared) == [said]
    assert notes_on_places(groups_of("4090 home, 4x4090 homes")) == []


def test_a_processor_may_stand_in_a_place_called_laptop() -> None:
    (group,) = groups_of("cpu laptop")
    assert (group.device, group.place.name) == ("cpu", "laptop")


def test_a_home_that_is_faster_up_than_down_is_pointed_out() -> None:
    said = "home:500/50 is 500 Mb/s up and 50 Mb/s down; most homes are slower up: home:50/500 is UP/DOWN"
    assert notes_on_places(groups_of("4090 home:500/50, A100 lab:500/50")) == [said]


def test_a_home_has_a_home_s_link_and_any_other_place_that_of_a_data_centre() -> None:
    home, centre = groups_of("4090 home-of-ann, 4090 oregon")
    assert (home.place.up / MBIT, home.place.down / MBIT) == (20, 100)
    assert (centre.place.up / MBIT, centre.place.down / MBIT) == (1000, 1000)


def test_the_link_of_a_place_is_given_once() -> None:
    one, other = groups_of("4090 home:50/500, 3090 home")
    assert one.place == other.place
    with pytest.raises(UserError, match="home has two different links"):
        groups_of("4090 home:50/500, 3090 home:20/100")


def test_peers_of_one_place_share_its_link_and_a_peer_alone_has_it() -> None:
    topology = topology_of(groups_of("2x4090 home:50/500, A100 oregon"), [24.0, 40.0], [1.0, 1.0])
    assert [(site.region, site.up) for site in topology.sites] == [("home", 50 * MBIT)]
    assert topology.up[2] == 1000 * MBIT
    assert topology.bandwidth[0, 1] == 1000 * MBIT
    assert topology.bandwidth[0, 2] == 50 * MBIT
    assert np.allclose(topology.delay_s[0], [0, 0.5e-3, 30e-3])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "expects parts such as"),
        ("0x4090", "at least 1 peer"),
        ("9999x4090", "at most 4096 peers"),
        ("4090 home:fast", "expected a rate in Mb/s"),
        ("4090 home:50Mb/s", r"home:50Mb/s lacks the downlink; write home:UP/DOWN in Mb/s, such as home:50/500"),
        ("4090 home:50", r"home:50 lacks the downlink; write home:UP/DOWN in Mb/s, such as home:50/500"),
        ("4x4090;home", r"expects parts such as .*, with commas between them; got '4x4090;home'"),
        ("4xRTX4090 home 50/500", "a link stands behind its place, such as home:50/500; got"),
        ("4x4090 50/500", "a link stands behind its place, such as home:50/500; got"),
        ("4 4090 home", "--peers: write 4x4090 home; got '4 4090 home'"),
        ("4090 x4 home:50/500", "--peers: write 4x4090 home:50/500; got"),
        ("4090x4", "--peers: write 4x4090; got"),
        ("4, 4090 home", "--peers: write 4x4090, with the device that you mean; got '4'"),
        ("3080, 4090 home:1,5/500", "got '3080, 4090 home:1,5/500'; write 3080, 4090 home:1.5/500"),
        ("1xRTX 3060 laptop", "a laptop's card has less memory and speed .*; name a weaker desktop card, or add a row"),
        ("3060 laptop:50/500", "a laptop's card has less memory"),
        ("3060-laptop home", "a laptop's card has less memory"),
        ("RTX 3080 Ti Laptop GPU home", "a laptop's card has less memory"),
        ("2080 Max-Q", "a laptop's card has less memory"),
        ("4x4091 home", r"unknown device .4091.*did you mean RTX 4090"),
    ],
)
def test_what_is_wrong_is_one_clear_line(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        groups_of(text)


@pytest.mark.parametrize("name", ["4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "rtx4090"])
def test_a_card_is_found_by_the_names_that_people_and_drivers_use(name: str) -> None:
    assert card(name).name == "RTX 4090"


@pytest.mark.parametrize(
    ("name", "memory_gb"),
    [
        ("A100", 40),
        ("A100-40GB", 40),
        ("NVIDIA A100-PCIE-40GB", 40),
        ("A100-80GB", 80),
        ("a100_80g", 80),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("A100 80GB PCIe", 80),
        ("Tesla V100-SXM2-16GB", 16),
        ("V100-32GB", 32),
    ],
)
def test_the_memory_tells_cards_of_one_name_apart(name: str, memory_gb: float) -> None:
    assert card(name).memory_bytes == memory_gb * 1e9


def test_a_card_with_one_size_of_memory_is_found_with_and_without_it() -> None:
    assert card("NVIDIA H100 80GB HBM3") == card("H100 SXM5") == card("H100")
    assert card("RTX 4090 24GB") == card("4090")
    assert card("H100 PCIe") != card("H100")
    assert card("A10G") != card("A10")


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown device '4091'.*; did you mean RTX 4090\?"):
        card("4091")


def test_every_card_has_plausible_figures() -> None:
    assert len(cards()) > 30
    assert all(8e9 <= one.memory_bytes <= 200e9 and 2e13 <= one.flops <= 3e15 for one in cards().values())
