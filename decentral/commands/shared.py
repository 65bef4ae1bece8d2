"""What the commands share: flags that fail with one line, and exit codes.

0: done, also after Ctrl-C, but for commands whose result would be missing then (`Command.interrupted`). 1: an error of
our own. 2: one line on stderr says what to mend.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from decentral.commands import table
from decentral.commands.output import OutputGone, outputs
from decentral.core.errors import UserError
from decentral.core.near_names import did_you_mean
from decentral.core.plain_text import printable

T = TypeVar("T")
LOG_NAMES = ("tensorboard", "wandb")  # of experiment trackers; their packages and extras are called so too
STAGE = "starting: "  # begins each line that says what a peer does before it trains
ERROR_CHARS = 2000  # of the line that says what to mend


class Parser(argparse.ArgumentParser):
    """An argparse parser whose help ends with the command's examples, and whose error is a UserError of one line."""

    def format_help(self) -> str:
        lines = "".join(f"\n  {line}" for line in table.examples(self.prog))
        return as_called(super().format_help() + (f"\nexamples:{lines}\n" if lines else ""))

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        meant = did_you_mean(unknown, self._option_string_actions) if unknown.startswith("--") else ""
        raise UserError(as_called(f"{message}{meant} (see {self.prog} --help)"))


def as_called(text: str) -> str:
    """The text with our commands named in the way in which the user has called this one."""
    by_one_name = Path(sys.argv[0]).name == "decentral"
    return text.replace(table.CALL, "decentral ") if by_one_name else text


def size(text: str) -> int:
    """Return the bytes that 800000000, 800MB, 16GB or 1.5e9 means. Raises ArgumentTypeError for anything else."""
    number, unit = text.strip().rstrip("Bb"), 1
    for position, prefix in enumerate("kmgt", 1):
        if number.lower().endswith(prefix):
            number, unit = number[:-1], 1000**position
    try:
        value = float(number) * unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1 << 60:
        raise argparse.ArgumentTypeError(f"expected a size such as 800MB or 16GB; got {text!r}")
    return int(value)


def several(text: str, read: Callable[[str], T]) -> list[T]:
    """The values between the commas of a text; none if `read` refuses one of them."""
    try:
        return [read(part) for part in text.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        return []


def host_port(text: str) -> tuple[str, int]:
    """The address that `9100`, `0.0.0.0:9100` or `[::]:9100` means, on this machine only where no host is named.

    Raises ArgumentTypeError for anything else. Port 0 is any free one.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or (colon and not host):
        raise argparse.ArgumentTypeError(f"expected [HOST:]PORT, such as 9100 or 0.0.0.0:9100; got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def log_names(text: str) -> list[str]:
    """The logs that `tensorboard`, `wandb` or both with a comma name. Raises ArgumentTypeError for others."""
    names = list(dict.fromkeys(text.split(",")))
    if not set(names) <= set(LOG_NAMES):
        raise argparse.ArgumentTypeError(f"expected {' or '.join(LOG_NAMES)}, or both with a comma; got {text!r}")
    return names


def require_extra(flag: str, package: str, module: str, extra: str) -> None:
    """Raises UserError where the package that a flag needs is not installed; it names the command that installs it."""
    if find_spec(module) is None:
        raise UserError(f"{flag} needs {package}: pip install 'decentral[{extra}]'")


def one_line(error: Exception) -> str:
    """What an error says, fit to be shown: others' words may be in it."""
    return printable(" ".join(str(error).split()), ERROR_CHARS)


def stage(text: str) -> None:
    """Tell the user what a peer that starts is doing: some of it takes a minute on a machine that is loaded."""
    print(f"{STAGE}{printable(text, ERROR_CHARS)}", flush=True)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command as Ctrl-C does: without SIGHUP where `nohup` has turned it off."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def _end_as_ctrl_c_does() -> None:
    """Make the first notice of an end (`kill`, a closed terminal) raise KeyboardInterrupt, and the next do nothing.

    A closing session sends several signals at once; the later ones are ignored, so that the command can still clean up.
    A second Ctrl-C interrupts the clean-up.
    """
    notices = [each for each in ending_signals() if each != signal.SIGINT]

    def notice(_: int, frame: FrameType | None) -> None:
        for each in notices:
            signal.signal(each, signal.SIG_IGN)
        ctrl_c = signal.getsignal(signal.SIGINT)  # a shell that starts a script's `command &` has it ignored
        (ctrl_c if callable(ctrl_c) else signal.default_int_handler)(signal.SIGINT, frame)

    if threading.current_thread() is threading.main_thread():
        for each in notices:
            signal.signal(each, notice)


@contextmanager
def loading(interrupted: int = 0) -> Iterator[None]:
    """End this process at once on Ctrl-C, SIGTERM and SIGHUP while a command imports what computes.

    `interrupted` is its exit code then. A signal that is ignored stays so.

    torch and libp2p take seconds to load, and an import that is interrupted may leave a half of a library behind. To
    be used before the command holds anything that must be cleaned up.
    """
    heard = [each for each in ending_signals() if signal.getsignal(each) is not signal.SIG_IGN]
    ending = heard if threading.current_thread() is threading.main_thread() else []
    before = [signal.signal(each, lambda *_: os._exit(interrupted)) for each in ending]
    try:
        yield
    finally:
        for each, handler in zip(ending, before, strict=True):
            signal.signal(each, handler)


def run(main: Callable[[], None], interrupted: int = 0, lasting: bool = False) -> int:
    """Run a command and return its exit code.

    SIGTERM and SIGHUP end the command as Ctrl-C does, so that it ends the processes that it started. Any exception
    other than UserError, KeyboardInterrupt and OutputGone is raised unchanged.

    Args:
        main: The command.
        interrupted: Exit code after Ctrl-C.
        lasting: Whether to go on when stdout cannot be written.

    Returns:
        The exit code; 0 also if whoever read the output has ended.
    """
    _end_as_ctrl_c_does()
    try:
        with outputs(lasting):
            try:
                main()
            except UserError as error:
                print("error:", one_line(error), file=sys.stderr)
                return 2
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it would interrupt the interpreter's wait for threads
        return interrupted
    except OutputGone as error:
        if not error.nobody_reads:
            print("error:", one_line(error), file=sys.stderr)
        return 0 if error.nobody_reads else 2
    return 0
