"""Which callers a port accepts: names of this machine, and no more connections of one network than are free."""

import pytest

from decentral.view.callers import has_room, is_ours, own_names


def test_the_name_to_which_a_port_is_bound_and_this_machine_s_own_are_ours() -> None:
    names = own_names("Swarm.Lab")
    assert is_ours("swarm.lab:9100", names)
    assert is_ours("localhost", names)
    assert not is_ours("evil.example", names)
    assert not is_ours("evil.example:9100", own_names("0.0.0.0"))


@pytest.mark.parametrize(
    ("host", "ours"),
    [("[::1]:80", True), ("127.0.0.1:", True), ("[127.0.0.1", False), ("127.0.0.1]:80", False), ("[[::1]]", False),
     ("localhost:x", False), ("[x]", False), (":80", False)],
)  # fmt: skip
def test_a_host_that_is_not_written_as_one_is_not_ours(host: str, ours: bool) -> None:
    """A bracket without the other counted as an address, and the URLs made of it raised errors."""
    assert is_ours(host, own_names("0.0.0.0")) == ours


def test_one_caller_gets_half_and_two_get_a_third_each() -> None:
    callers = list[str]()
    for caller in ["A"] * 100 + ["B"] * 100 + ["C"] * 100:
        if has_room(caller, [*callers, caller], 12):
            callers.append(caller)
    assert [callers.count(caller) for caller in "ABC"] == [6, 3, 1]
