"""What all commands share: flags, signals that end them, and output that nobody reads."""

import argparse
import asyncio
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from rich.table import Table

from decentral import __main__ as decentral_main
from decentral.commands import estimate, export, local, peer, shared
from decentral.commands.table import COMMANDS, module_of
from decentral.core.errors import ExitCode, UserError


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_a_terminal_without_a_character_shows_a_question_mark(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a region that a peer names in Japanese."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert shared.run(lambda: print("region \u6771\u4eac")) == 0
    shown = "region \u6771\u4eac" if encoding == "utf-8" else "region ??"
    assert terminal.buffer.getvalue().decode(encoding) == shown + "\n"


def test_a_flag_that_is_no_size(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert peer.main(["--memory", "much", "--state-dir", str(tmp_path / "peer")]) == 2
    assert "--memory" in capfd.readouterr().err
    assert local.main(["--peers", "3", "--memory", "1GB,2GB"]) == 2
    assert capfd.readouterr().err == "error: --memory expects one size or 3, such as 800MB,16GB; got '1GB,2GB'\n"


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
    assert shared.host_port(text) == address


@pytest.mark.parametrize("text", ["", ":9100", "65536", "-1", "port", "a:b", "1.5", "９１００"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected \\[HOST:\\]PORT"):
        shared.host_port(text)


def test_logs_are_named_once_each() -> None:
    assert shared.log_names("wandb,tensorboard,wandb") == ["wandb", "tensorboard"]
    with pytest.raises(argparse.ArgumentTypeError, match="expected one or several of tensorboard, wandb; got 'mlflow'"):
        shared.log_names("mlflow")


def test_an_unknown_flag_or_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"arguments: --dahboard; did you mean --dashboard\?"):
        peer.parse(["--dahboard"])
    with pytest.raises(UserError, match=r"arguments: --seconds \(see"):  # not --events
        local.parse(["--seconds", "240"])
    assert decentral_main.main(["per"]) == 2
    assert capsys.readouterr().err.endswith("got 'per'; did you mean peer?\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("status", "ps"), ("list", "ps"), ("train", "local (all peers on this machine) or peer (one)"), ("Join", "peer")],
)
def test_a_command_is_found_by_what_people_call_it(capsys: pytest.CaptureFixture[str], typed: str, meant: str) -> None:
    assert decentral_main.main([typed]) == 2
    assert capsys.readouterr().err.endswith(f"got {typed!r}; did you mean {meant}?\n")
    assert not decentral_main.OTHER_NAMES.keys() & COMMANDS.keys()


@pytest.mark.parametrize(
    ("command", "flags", "meant"),
    [
        ("peer", ["--memry=8GB"], "--memory"),
        ("plan", ["spot", "--objective", "synch"], "sync"),
        ("invite", ["--state-dir", "x", "--may", "trian"], "train"),
        ("export", ["--out", "x", "--format", "hugingface"], "huggingface"),
        ("peer", ["--log", "tensorbord"], "tensorboard"),
        ("simulate", ["--only", "liar"], "liars"),
    ],
)
def test_a_mistyped_flag_or_value_names_the_nearest(command: str, flags: list[str], meant: str) -> None:
    with pytest.raises(UserError, match=rf"; did you mean {meant}\?"):
        module_of(command).parse(flags)


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("peer", ["--throttle", "fast"], "argument --throttle: expected a number such as 1.5; got 'fast' (see"),
        ("peer", ["--throttle", "1,5"], "expected a number such as 1.5; got '1,5'; write 1.5 (see"),
        (
            "peer",
            ["--memory", "8"],
            "argument --memory: expected a size with a unit, such as 8GB; got '8'; did you mean",
        ),
        (
            "peer",
            ["--split", "tensr"],
            "expected one of auto, copies, parts, tensor; got 'tensr'; did you mean tensor?",
        ),
        ("local", ["2"], "shipped config; got 2; to run 2 peers on this machine: python -m decentral.local --peers 2"),
        ("peer", ["--peers", "2"], "to run several peers on this machine: python -m decentral.local --peers N (see"),
        ("local", ["--steps", "3"], "arguments: --steps; to end after N steps: --stop-after Nsteps (see"),
        ("peer", ["--set", "depth", "3"], "as one argument, such as train.learning_rate=1e-3; got 'depth'; did you"),
        ("local", ["--set", "depth", "3"], "got 'depth'; did you mean --set model.depth=VALUE? (see"),
        ("local", ["--window-s", "2"], "arguments: --window-s; did you mean --set gossip.window_s=VALUE? (see"),
        ("local", ["--peers", "four"], "argument --peers: expected a whole number such as 4; got 'four' (see"),
        ("local", ["--memory", "8"], "--memory: expected a size with a unit, such as 8GB; got '8'; did you mean 8GB?"),
        ("local", ["--memory", "1,5GB"], "got '1,5GB'; write 1.5GB for one size, or 1GB,5GB"),
        ("local", ["--peers", "4,5"], "argument --peers: expected a whole number such as 4; got '4,5' (see"),
        ("local", ["--dashboard", "::1:4001"], "got '::1:4001'; did you mean [::1]:4001?"),
        (
            "local",
            ["--state-dir", ""],
            "argument --state-dir: expected a value; got ''; give one, or leave it out (see",
        ),
        ("peer", ["--state-dir="], "argument --state-dir: expected a value; got ''; give one, or leave it out (see"),
        ("peer", [""], "argument CONFIG: expected a value; got ''"),
        ("identity", ["--state-dir", ""], "argument --state-dir: expected a value; got ''; give one (see"),
        ("estimate", ["--peers", "4090", "--model", ""], "argument --model: expected a value; got ''"),
        (
            "estimate",
            ["--peers", "4", "4090", "home"],
            "unrecognized arguments: home; put quotes around a value that has",
        ),
        ("local", ["--stop-after", "0,5h"], "got '0,5h'; write 0.5h"),
        ("generate", ["--temperature", "0,7", "x"], "expected a number such as 1.5; got '0,7'; write 0.7 (see"),
        ("simulate", ["--memory", "1GB,8"], "expected a size with a unit, such as 8GB; got '8'; did you mean 8GB?"),
    ],
)
def test_a_value_of_the_wrong_type_says_what_is_expected(command: str, flags: list[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        module_of(command).parse(flags)


def test_a_missing_extra_is_one_line_that_names_the_command() -> None:
    shared.require_extra("--metrics", "json", "json", "metrics")
    with pytest.raises(UserError, match=r"^--metrics needs nothing-here: pip install 'decentral\[metrics\]'$"):
        shared.require_extra("--metrics", "nothing-here", "nothing_here", "metrics")


def test_the_ports_of_a_local_swarm_follow_the_first() -> None:
    flags = local.parse(["--peers", "2", "--metrics", "[::1]:9100"])
    assert flags.metrics is not None
    assert [shared.metrics_address(flags.metrics, number) for number in (0, 1)] == ["[::1]:9100", "[::1]:9101"]
    assert shared.metrics_address(("127.0.0.1", 0), 3) == "127.0.0.1:0"


# Output that nobody reads


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A pipe whose reader has ended."""
    theirs, ours = os.pipe()
    os.close(theirs)
    with os.fdopen(ours, "w") as stream:
        yield stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), ours)  # whatever a failing test leaves in its buffer


@pytest.fixture
def full() -> Iterator[TextIO]:
    """A file on a disk that takes no more."""
    with Path("/dev/full").open("w") as stream:
        yield stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def exit_code(main: Callable[[], Any]) -> int:
    """Return the exit code of a process whose last call this is."""
    try:
        return int(main() or 0)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_may_be_cut_off_by_its_reader(
    name: str, unread: TextIO, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    assert exit_code(lambda: module_of(name).main(["--help"])) == 0
    unread.flush()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("lasting", "done"), [(True, [1, 2, 3]), (False, [1])])
def test_only_a_command_whose_work_is_its_output_ends_with_its_reader(
    lasting: bool, done: list[int], unread: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = []

    def work() -> None:
        for number in (1, 2, 3):
            worked.append(number)
            print(number, flush=True)

    monkeypatch.setattr(sys, "stdout", unread)
    assert shared.run(work, lasting=lasting) == 0
    assert worked == done


def test_a_result_that_the_disk_does_not_take_is_an_error(
    full: TextIO, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", full)
    assert shared.run(lambda: print("the result")) == 2
    assert capfd.readouterr().err == "error: the output cannot be written (No space left on device)\n"


def test_a_command_that_works_on_does_not_mind_a_full_disk_under_its_log(
    full: TextIO, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", full)
    assert shared.run(lambda: print("a line", flush=True), lasting=True) == 0
    assert capfd.readouterr().err == ""


def test_a_remedy_that_nobody_reads_changes_no_exit_code(unread: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken() -> None:
        raise UserError("do it otherwise")

    monkeypatch.setattr(sys, "stderr", unread)
    assert shared.run(mistaken) == 2


def test_a_command_without_any_output_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert shared.run(lambda: print("a line")) == 0


def test_the_list_of_commands_may_be_cut_off_by_its_reader(unread: TextIO) -> None:
    found = subprocess.run([sys.executable, "-m", "decentral"], stdout=unread, stderr=subprocess.PIPE, check=False)
    assert (found.returncode, found.stderr) == (0, b"")


# Signals


@pytest.fixture
def kept_handlers() -> Iterator[None]:
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("kept_handlers")
@pytest.mark.parametrize("notice", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_ends_a_command_lets_it_leave_in_order(notice: signal.Signals) -> None:
    left = []

    def work() -> None:
        try:
            signal.raise_signal(notice)
        finally:
            for again in {notice} - {signal.SIGINT}:  # as a session that ends sends several
                signal.raise_signal(again)
            left.append(notice)

    assert shared.run(work) == 130
    assert left == [notice]
    signal.raise_signal(signal.SIGINT)  # once more, while the interpreter ends


@pytest.mark.usefixtures("kept_handlers")
@pytest.mark.parametrize("notice", [signal.SIGTERM, signal.SIGHUP])
def test_a_notice_ends_a_command_that_a_script_has_started_in_the_background(notice: signal.Signals) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the shell does
    assert shared.run(lambda: signal.raise_signal(notice)) == 130


@pytest.mark.usefixtures("kept_handlers")
def test_nohup_keeps_a_command_running_where_its_terminal_is_closed() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert shared.run(lambda: signal.raise_signal(signal.SIGHUP)) == 0
    assert signal.SIGHUP not in shared.ending_signals()


@pytest.mark.parametrize(("ignored", "code"), [(False, 130), (True, 7)])
def test_ctrl_c_while_a_command_loads_gives_no_success_and_stays_ignored_where_it_was(ignored: bool, code: int) -> None:
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN); " if ignored else ""
    program = f"import signal, sys; from decentral.commands import shared; {ignore}"
    program += "load = shared.loading('nothing written'); load.__enter__(); "
    program += "signal.raise_signal(signal.SIGINT); sys.exit(7)"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "" if ignored else "interrupted; nothing written\n")


@pytest.mark.usefixtures("kept_handlers")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_ctrl_c_ends_before_its_work_is_done_gives_no_success_and_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module_of(name), "parse", lambda _: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(peer, "heed", lambda: None)
    assert decentral_main.main([name]) == ExitCode.INTERRUPTED
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.usefixtures("kept_handlers")
def test_an_export_that_ctrl_c_ends_says_that_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(visit: Coroutine[Any, Any, Any]) -> None:
        visit.close()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(asyncio, "run", interrupted)
    flags = ["--join", "/ip4/192.0.2.7/tcp/4001/p2p/QmViNS8YCd6cZzwyBLzHbkQVrWBD2AQpKcr1cceozqQ5RN", "--out", "out"]
    assert export.main(flags) == ExitCode.INTERRUPTED
    assert capsys.readouterr() == ("", "interrupted; nothing written\n")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "peer"])
def test_ctrl_c_while_a_command_is_read_ends_it_without_a_word(name: str, tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", f"decentral.{name}"], capture_output=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_a_table_in_a_pipe_keeps_each_row_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, cells = Table(box=None), ["a cell of twenty-five chars"] * 5
    table.add_row(*cells)
    lines = {}
    for columns in (None, "80"):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        shared.result_console().print(table)
        lines[columns] = len(capsys.readouterr().out.strip().splitlines())
    assert lines[None] == 1 < lines["80"]


def test_a_unit_apart_from_its_number_is_not_taken_for_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "argument CONFIG: .* got 'B', a unit: write it without a blank after its number, such as 10B"
    with pytest.raises(UserError, match=said):
        estimate.parse(["--peers", "4xcpu", "--tokens", "10", "B"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "B").touch()
    assert estimate.parse(["--peers", "4xcpu", "--tokens", "10", "B"]).config == "B"


def test_no_line_in_a_pipe_ends_with_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("model", "limit", box=None)
    table.add_row("10M", "compute")
    table.add_row("1B", "memory: it needs 30.0 GB")
    console = shared.result_console()
    console.print(table)
    console.print("note: a blank \n")
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines[:2]] == ["model  limit", "10M    compute"]
    assert lines == [line.rstrip() for line in lines]


@pytest.mark.parametrize(("said", "shown"), [("`torch.jit.script` is deprecated. Please", False), ("other", True)])
def test_users_see_no_warning_that_a_library_raises_as_it_loads(said: str, shown: bool) -> None:
    """torch 2.14 shows this one for hivemind; torch 2.13 still hid it."""
    program = f"import decentral.commands.shared, warnings; warnings.warn({said!r}, FutureWarning)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert (said in done.stderr) == shown
