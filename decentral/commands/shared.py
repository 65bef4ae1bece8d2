"""Code that all commands share: running a command, and parsers of flags. Start reading at `run`.

core/errors.py has the exit codes (`ExitCode`).
"""

import argparse
import math
import os
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, NoReturn, TypeVar, cast

from decentral.commands import table
from decentral.commands.output import OutputGone, Unpadded, outputs
from decentral.core import ids, quantities
from decentral.core.errors import ExitCode, UserError
from decentral.core.near_names import did_you_mean, nearest
from decentral.core.plain_text import error_text, printable

if TYPE_CHECKING:
    from rich.console import Console

# hivemind 1.1.12 calls torch.jit.script as it loads; since torch 2.14, that would warn the users of every command.
warnings.filterwarnings("ignore", message=r".torch\.jit\.script. is deprecated", category=FutureWarning)

T = TypeVar("T")
LOG_NAMES = ("tensorboard", "wandb")  # experiment trackers; their packages have these names
STARTING = "starting: "  # prefix of the lines that a peer prints while it starts
ERROR_CHARS = 2000
EXPECTED = {"int": "a whole number such as 4", "float": "a number such as 1.5"}  # type of a flag -> what is expected
MAY_BE_EMPTY = ("region", "text")  # a peer's region and a prompt; any other empty argument is a mistake
MISTAKEN = {  # (a flag that a command lacks, another flag that the command has) -> what is meant
    ("peers", "state-dir"): f"to run several peers on this machine: {table.CALL}local --peers N",
    ("steps", "stop-after"): "to end after N steps: --stop-after Nsteps",
}
UNRECOGNIZED = "unrecognized arguments: "  # argparse's message about unknown flags begins with this
PORTS = 1 << 16
# A unit that was typed apart from its number, such as `10 B`; no config has such a name.
LONE_UNIT = r"[kKMBGT]|[kKMGT]i?[Bb](/s)?|[smhd]|tokens|steps"
PIPED_COLUMNS = 200  # tables in a pipe or a file may be this wide, so that no cell is wrapped and grep finds it


class Parser(argparse.ArgumentParser):
    """An argparse parser whose help ends with the command's examples, and whose error is a UserError of one line."""

    def format_help(self) -> str:
        """Return argparse's help, followed by the command's examples."""
        lines = "".join(f"\n  {line}" for line in table.examples(self.prog))
        return as_called(super().format_help() + (f"\nexamples:{lines}\n" if lines else ""))

    def _get_value(self, action: argparse.Action, arg_string: str) -> object:
        """Return the value of an argument; an empty one, such as that of an unset variable, is refused.

        It is accepted if it is the default, which argparse passes to this method, too.
        """
        if not arg_string and "" not in (action.const, action.default) and action.dest not in MAY_BE_EMPTY:
            out = "give one, or leave it out" if not action.required else "give one"
            raise argparse.ArgumentError(action, f"expected a value; got ''; {out}")
        if action.dest == "config" and re.fullmatch(LONE_UNIT, arg_string) and not Path(arg_string).exists():
            apart = f"got {arg_string!r}, a unit: write it without a blank after its number, such as 10{arg_string}"
            raise argparse.ArgumentError(action, f"expected a YAML file or a shipped config; {apart}")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """Raise UserError with argparse's message; it names what is nearest to an unknown flag or choice."""
        if refused := re.fullmatch(r"(argument .*): invalid (int|float) value: '(.*)'", message, re.DOTALL):
            message = f"{refused[1]}: {quantities.unreadable(EXPECTED[refused[2]], refused[3], refused[2] == 'int')}"
        raise UserError(as_called(f"{message}{self._meant(message)} (see {self.prog} --help)"))

    def _meant(self, message: str) -> str:
        """Return what may be meant by the unknown flag, choice or argument that argparse's message names, else ""."""
        if message.startswith(UNRECOGNIZED):
            flag = message.removeprefix(UNRECOGNIZED).split()[0].partition("=")[0]
            known = {name.lstrip("-"): name for name in self._option_string_actions}
            if not flag.startswith("-"):
                return "; put quotes around a value that has spaces"
            mistaken = [said for (lacking, has), said in MISTAKEN.items() if flag == f"--{lacking}" and has in known]
            if mistaken:
                return f"; {mistaken[0]}"
            if "set" in known and (key := _meant_key(flag.lstrip("-"))):
                return key
            near = nearest(flag.lstrip("-"), known) if flag.startswith("--") else None
            return f"; did you mean {known[near]}?" if near else ""
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        return did_you_mean(found[1], re.findall(r"[\w.-]+", found[2])) if found else ""


def as_called(text: str) -> str:
    """Return a text with `python -m decentral.NAME` replaced by `decentral NAME`, if the user called `decentral`."""
    by_one_name = Path(sys.argv[0]).name == "decentral"
    return text.replace(table.CALL, "decentral ") if by_one_name else text


def terminal_columns() -> int | None:
    """Return how wide a command's result may be: as COLUMNS says, or the terminal is; None in a pipe or a file."""
    asked = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if asked else None


def result_console() -> "Console":
    """Return the console for a command's result: as wide as the terminal, or PIPED_COLUMNS wide without one."""
    from rich.console import Console

    file = None if sys.stdout.isatty() else cast(IO[str], Unpadded(sys.stdout))
    return Console(file=file, highlight=False, width=terminal_columns() or PIPED_COLUMNS)


def finite(text: str) -> float:
    """Convert a text to a number. Raises ArgumentTypeError if it is no number, infinite or NaN."""
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise quantities.unreadable(EXPECTED["float"], text)


def several(text: str, read: Callable[[str], T]) -> list[T]:
    """Convert each part of a comma-separated text by `read`, and return the values; [] if `read` rejects a part."""
    try:
        return [read(part) for part in text.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        return []


def host_port(text: str) -> tuple[str, int]:
    """Return host and port in a text such as `9100`, `0.0.0.0:9100` or `[::]:9100`.

    The host is 127.0.0.1 if none is named. Port 0 stands for any free port.

    Raises:
        ArgumentTypeError: If the text has another form.
    """
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < PORTS
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not is_port or (colon and not host) or bare_ipv6:
        meant = f"; did you mean [{host}]:{port}?" if is_port and bare_ipv6 and host.strip(":") else ""
        raise argparse.ArgumentTypeError(f"expected [HOST:]PORT, such as 9100 or 0.0.0.0:9100; got {text!r}{meant}")
    return host.strip("[]") or "127.0.0.1", int(port)


def peer_address(text: str) -> str:
    """Return a text that has the form of a peer's address.

    `PeerNetwork.parse_address` checks the address further, but loads libp2p.

    Raises:
        UserError: If the text has another form, or a part of its peer id is missing.
    """
    if re.fullmatch(r"/\S+/p2p/[1-9A-HJ-NP-Za-km-z]{1,128}", text):
        if not ids.is_whole(text.rpartition("/")[2]):
            raise UserError(f"--join {text}: the peer id at its end is incomplete or mistyped; copy the whole address")
        return text
    raise UserError(f"--join expects an address such as /ip4/203.0.113.7/tcp/4001/p2p/Qm...; got {text!r}")


def add_join_flag(parser: argparse.ArgumentParser, about: str) -> None:
    """Add the flag `--join ADDR`, which may be repeated, with `about` as its help; its value is a list of addresses."""
    parser.add_argument("--join", type=peer_address, action="append", default=[], metavar="ADDR", help=about)


def add_set_flag(parser: argparse.ArgumentParser, about: str = "override a key of CONFIG") -> None:
    """Add the flag `--set KEY=VALUE`, which may be repeated, with `about` as its help; its value is a list of texts."""
    parser.add_argument("--set", type=_key_value, action="append", default=[], metavar="KEY=VALUE", help=about)


def _key_value(text: str) -> str:
    if "=" not in text:
        expected = "expected KEY=VALUE as one argument, such as train.learning_rate=1e-3"
        raise argparse.ArgumentTypeError(f"{expected}; got {text!r}{_meant_key(text)}")
    return text


def _meant_key(name: str) -> str:
    """Return `; did you mean --set KEY=VALUE?` with the config's key that is, or ends with, `name`, else ""."""
    from decentral.core.config import Config
    from decentral.core.config_keys import keys_of

    paths, wanted = [known.path for known in keys_of(Config)], name.lower().replace("-", "_")
    found = next((path for path in paths if wanted in (path, path.rpartition(".")[2])), None)
    return f"; did you mean --set {found}=VALUE?" if found else ""


def refuse_number(config: str | None) -> None:
    """Raise UserError if CONFIG is a number and no file, since a number of peers is meant."""
    if config and config.isdigit() and not Path(config).exists():
        meant = as_called(f"to run {config} peers on this machine: {table.CALL}local --peers {config}")
        raise UserError(f"CONFIG expects a YAML file or the name of a shipped config; got {config}; {meant}")


def metrics_address(first: tuple[str, int], number: int) -> str:
    """Return HOST:PORT for the metrics of peer `number`: the first peer's port + `number`, or 0 for any free port."""
    host, port = first
    return f"{f'[{host}]' if ':' in host else host}:{port + number if port else 0}"


def names_of(text: str, known: Sequence[str]) -> list[str]:
    """Return the names, once each, in a text such as `tensorboard,wandb`.

    Args:
        text: Names with commas between them.
        known: All names that are allowed.

    Raises:
        ArgumentTypeError: If another name is given; the error names the nearest one.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        expected = f"expected one or several of {', '.join(known)}; got {unknown!r}"
        raise argparse.ArgumentTypeError(f"{expected}{did_you_mean(unknown, known)}")
    return names


def log_names(text: str) -> list[str]:
    """Return the experiment trackers that a text names. Raises ArgumentTypeError if another name is given."""
    return names_of(text, LOG_NAMES)


def require_extra(flag: str, package: str, module: str, extra: str) -> None:
    """Raise UserError if a flag needs a package that is missing; the error has the command that installs the package.

    Args:
        flag: The flag, for the message.
        package: The package's name on PyPI, for the message.
        module: The module that the package installs.
        extra: The optional dependency group of decentral that has the package.
    """
    if find_spec(module) is None:
        raise UserError(f"{flag} needs {package}: pip install 'decentral[{extra}]'")


def one_line(error: Exception) -> str:
    """Return an error's text as one printable line, because it may quote other peers."""
    return printable(error_text(error, None), ERROR_CHARS)


def starting(text: str) -> None:
    """Print what a starting peer is doing now, because a start may take minutes on a loaded machine."""
    print(f"{STARTING}{printable(text, ERROR_CHARS)}", flush=True)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command as Ctrl-C does; without SIGHUP if `nohup` made the process ignore it."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def _end_as_ctrl_c_does() -> None:
    """Make the first SIGTERM or SIGHUP raise KeyboardInterrupt, and ignore further ones.

    A terminal that closes may send several of these signals at once; only the first may interrupt the command, so that
    it can clean up. A second Ctrl-C interrupts the clean-up.
    """
    notices = [each for each in ending_signals() if each != signal.SIGINT]

    def notice(_: int, frame: FrameType | None) -> None:
        for each in notices:
            signal.signal(each, signal.SIG_IGN)
        ctrl_c = signal.getsignal(signal.SIGINT)  # SIG_IGN if a script started the command with `&`
        (ctrl_c if callable(ctrl_c) else signal.default_int_handler)(signal.SIGINT, frame)

    if threading.current_thread() is threading.main_thread():
        for each in notices:
            signal.signal(each, notice)


@contextmanager
def loading(result: str = "") -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP end this process at once within the block, which imports large libraries.

    The exit code is then `ExitCode.INTERRUPTED`, and a line on stderr says so.

    torch and libp2p take seconds to load, and an interrupted import may leave a half-loaded library. Use the block only
    before the command has anything to clean up. Signals that the process ignores are still ignored.

    Args:
        result: What the line says of the command's result, such as "nothing written"; "": nothing.
    """

    def end(*_: object) -> None:
        with suppress(OSError):  # stderr is closed
            os.write(2, f"{_interrupted(result)}\n".encode())
        os._exit(ExitCode.INTERRUPTED)

    heard = [each for each in ending_signals() if signal.getsignal(each) is not signal.SIG_IGN]
    ending = heard if threading.current_thread() is threading.main_thread() else []
    before = [signal.signal(each, end) for each in ending]
    try:
        yield
    finally:
        for each, handler in zip(ending, before, strict=True):
            signal.signal(each, handler)


@contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt at once within the block, as before `asyncio.run`.

    asyncio's own handler only cancels the task, which computes until its next `await`, maybe for minutes. SIGTERM and
    SIGHUP follow, since `_end_as_ctrl_c_does` lets them call the handler of SIGINT. An ignored SIGINT stays ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    heard = callable(before) and threading.current_thread() is threading.main_thread()
    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if heard:
            signal.signal(signal.SIGINT, before)


@contextmanager
def if_interrupted(result: str) -> Iterator[None]:
    """Say what `result` says of the command's result if Ctrl-C ends it within the block, such as "nothing written"."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(result) from None


def _interrupted(result: str) -> str:
    return f"interrupted; {result}" if result else "interrupted"


def run(main: Callable[[], None], lasting: bool = False) -> int:
    """Run a command and return its exit code.

    SIGTERM and SIGHUP end the command as Ctrl-C does, so that it ends the processes that it started. Any exception
    other than UserError, KeyboardInterrupt and OutputGone is raised unchanged.

    Args:
        main: The command.
        lasting: Whether to go on when stdout cannot be written.

    Returns:
        DONE, also if the program that reads stdout has ended; INTERRUPTED after Ctrl-C; MISTAKE after a UserError, or
        if stdout cannot be written for another reason.
    """
    _end_as_ctrl_c_does()
    try:
        with outputs(lasting):
            try:
                main()
            except UserError as error:
                print("error:", one_line(error), file=sys.stderr)
                return ExitCode.MISTAKE
            except KeyboardInterrupt as error:
                print(_interrupted(str(error)), file=sys.stderr)
                raise
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not let Ctrl-C interrupt Python's exit
        return ExitCode.INTERRUPTED
    except OutputGone as error:
        if not error.nobody_reads:
            print("error:", one_line(error), file=sys.stderr)
        return ExitCode.DONE if error.nobody_reads else ExitCode.MISTAKE
    return ExitCode.DONE
