"""Flags that several commands share."""

import argparse

import pytest

from decentral import command, local
from decentral.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9100", ("127.0.0.1", 9100)),
        ("0.0.0.0:9100", ("0.0.0.0", 9100)),
        ("[::1]:0", ("::1", 0)),
        ("lab.example:80", ("lab.example", 80)),
    ],
)
def test_a_port_is_on_this_machine_unless_a_host_is_named(text: str, address: tuple[str, int]) -> None:
    assert command.host_port(text) == address


@pytest.mark.parametrize("text", ["", ":9100", "65536", "-1", "port", "a:b", "1.5", "９１００"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected \\[HOST:\\]PORT"):
        command.host_port(text)


def test_logs_are_named_once_each() -> None:
    assert command.log_names("wandb,tensorboard,wandb") == ["wandb", "tensorboard"]
    with pytest.raises(argparse.ArgumentTypeError, match="expected tensorboard or wandb"):
        command.log_names("mlflow")


def test_a_missing_extra_is_one_line_that_names_the_command() -> None:
    command.require_extra("--metrics", "json", "json", "metrics")
    with pytest.raises(UserError, match=r"^--metrics needs nothing-here: pip install 'decentral\[metrics\]'$"):
        command.require_extra("--metrics", "nothing-here", "nothing_here", "metrics")


def test_the_ports_of_a_local_swarm_follow_the_first() -> None:
    flags = local.parse(["--peers", "2", "--metrics", "[::1]:9100"])
    assert [local.metrics_address(flags.metrics, number) for number in (0, 1)] == ["[::1]:9100", "[::1]:9101"]
    assert local.metrics_address(("127.0.0.1", 0), 3) == "127.0.0.1:0"
