"""Commands of recipes that a test cannot run as they stand: other machines, clouds, images, installations, peers.

`stand_in.py NAME ARGUMENT...` stands in for the command NAME. A machine is a folder; `ssh` runs its command there. A
peer goes on in the background, as in a terminal of its own, and its address is one of loopback. If RECIPE_DRY is set,
`decentral` does nothing but note how it was called.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
RECIPE = Path(os.environ["RECIPE"])
DRY = "RECIPE_DRY" in os.environ
LIMIT_S = 300.0  # against hanging
PUBLIC = "203.0.113.7"
CLONED = ("configs", "deploy", "docs", "pyproject.toml", "constraints.txt", "README.md")
NAMES = ("ssh", "scp", "rsync", "python3", "pip", "hf", "sky", "docker", "decentral")


def home(machine: str) -> Path:
    """Return the home of a machine, and make it."""
    found = RECIPE / "machines" / machine
    found.mkdir(parents=True, exist_ok=True)
    return found


def port(machine: str) -> int:
    """Return the port that stands for 4001 of a machine."""
    kept = home(machine) / "port"
    if not kept.exists():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            kept.write_text(str(free.getsockname()[1]))
    return int(kept.read_text())


def clone(folder: Path) -> None:
    """Make what stands for a clone of the repository, with a little data."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CLONED:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    for name in ("books", "chats.jsonl"):
        if not (folder / name).exists():
            (folder / name).symlink_to(RECIPE / name)
    for name in ("my-model", ".venv"):  # what everyone does before the first machine is named
        made = home("desk") / "clone" / name
        if made.exists() and not (folder / name).exists():
            (folder / name).symlink_to(made)


def shims(folder: Path) -> None:
    """Write a command for each name into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        shim = folder / name
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__)} {name} "$@"\n')
        shim.chmod(0o755)


def on(machine: str, command: Sequence[str], **variables: str) -> int:
    """Run a command at another machine, and return its exit code."""
    there = {"MACHINE": machine, "HOME": str(home(machine))}
    return subprocess.run(command, cwd=home(machine), env={**os.environ, **there, **variables}).returncode


def ssh(arguments: Sequence[str]) -> int:
    host, command = arguments
    before = len(background())
    code = on(host, ["bash", "-c", command])
    if command.endswith("&") and not DRY:
        _wait(lambda: len(background()) > before, None)
    return code


def scp(arguments: Sequence[str]) -> int:
    *sources, target = [one for one in arguments if one != "-r"]
    host, _, path = target.partition(":")
    for source in map(Path, sources):
        to = home(host) / path / source.name
        if not to.exists():
            shutil.copytree(source, to) if source.is_dir() else shutil.copy(source, to)
    return 0


def rsync(arguments: Sequence[str]) -> int:
    assert arguments[:3] == ["--archive", "--exclude", ".venv"], arguments
    host, _, path = arguments[-1].partition(":")
    clone(home(host) / path)
    return 0


def python3(arguments: Sequence[str]) -> int:
    if arguments[:2] == ["-m", "venv"]:
        folder = Path(arguments[2]).expanduser()
        shims(folder / "bin")
        (folder / "bin" / "activate").write_text(f'export PATH="{folder.resolve()}/bin:$PATH"\n')
        return 0
    if "checkip" in " ".join(arguments):
        print(PUBLIC)
        return 0
    return subprocess.run([sys.executable, *arguments]).returncode


def pip(arguments: Sequence[str]) -> int:
    """Check that what is to be installed exists: this project, with extras that it has."""
    for one in arguments[1:]:
        if one.startswith("."):
            extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", one)
            assert extras, one
            _check_extras(extras[1] or "")
    return 0


def _check_extras(names: str) -> None:
    """Check that this project has these extras, which are separated by commas."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name for name in names.split(",") if name} <= set(known), names


def hf(arguments: Sequence[str]) -> int:
    command, _, flag, folder = arguments
    assert (command, flag) == ("download", "--local-dir"), arguments
    if not Path(folder).exists():
        shutil.copytree(RECIPE / "model", folder)
    return 0


def sky(arguments: Sequence[str]) -> int:
    """Run a task's `setup` and `run` at a machine of its name; list or cancel what runs."""
    command, rest = arguments[:2], list(arguments[2:])
    assert command[0] == "jobs", arguments
    if command[1] != "launch":
        return 0
    given = {"--name": "peer", "--infra": ""}
    variables: dict[str, str] = {}
    task: dict[str, Any] = yaml.safe_load(Path(rest.pop(0)).read_text())
    for flag, value in zip(rest[::2], rest[1::2], strict=True):
        if flag in ("--env", "--secret"):
            name, _, said = value.partition("=")
            assert name in {**task["envs"], **task["secrets"]}, name
            variables[name] = said
        else:
            given[flag] = value
    clone(home(given["--name"]) / "sky")
    script = f"cd sky\n{task['setup']}\n{task['run']}"
    return on(given["--name"], ["bash", "-c", script], **{**task["envs"], **task["secrets"], **variables})


def docker(arguments: Sequence[str]) -> int:
    command, *rest = arguments
    if command == "build":
        return _build(rest)
    if command == "compose":
        return _compose(rest)
    if command == "run":
        return _run(rest)
    container = rest[0]
    if command == "exec":
        return _in_container(container, rest[1:], container)
    print((home(container) / "log").read_text() if command == "logs" and not DRY else "")
    return 0


def _build(flags: list[str]) -> int:
    """Play `docker build`: check the Containerfile's extras and ENTRYPOINT, and keep its CMD for `docker run`."""
    given = dict(zip(flags[:-1:2], flags[1:-1:2], strict=True))
    lines = Path(given["--file"]).read_text().splitlines()
    for extras in re.findall(r"extras=([\w,]+)", "\n".join(lines)):
        _check_extras(extras)
    entry, command = (json.loads(_last(lines, word)) for word in ("ENTRYPOINT", "CMD"))
    assert entry == ["tini", "--", "decentral"], entry
    (RECIPE / "image.json").write_text(json.dumps(command))
    return 0


def _last(lines: Sequence[str], word: str) -> str:
    return [line.removeprefix(word) for line in lines if line.startswith(f"{word} ")][-1]


def _run(flags: list[str]) -> int:
    """Run a container: its volume is a folder of the machine with the container's name."""
    given, alone = dict[str, str](), {"--rm"}
    while flags[0].startswith("--"):
        flag = flags.pop(0)
        if flag not in alone:
            given[flag] = flags.pop(0)
    command = flags[1:] or json.loads((RECIPE / "image.json").read_text())
    if "--gpus" in given:
        command = ["cpu" if one == "cuda" else one for one in command]
    volume = given["--volume"].partition(":")[0]
    return _in_container(given.get("--name", volume), ["decentral", *command], volume)


def _in_container(machine: str, command: Sequence[str], volume: str) -> int:
    state = home(machine) / volume
    state.mkdir(exist_ok=True)
    return on(machine, [one.replace("/state", str(state)) for one in command])


def _compose(flags: list[str]) -> int:
    """Bring up the services of a file, one after the other: what each one runs, in a folder for each volume."""
    assert flags[0] == "--file", flags
    services = yaml.safe_load(Path(flags[1]).read_text())["services"]
    if flags[2] != "up":
        return 0
    for name, service in services.items():
        script = service.get("command", [None])[0]
        mounts = dict(reversed(one.removesuffix(":ro").split(":")) for one in service["volumes"])
        if script is None:
            command = ["decentral", *json.loads((RECIPE / "image.json").read_text())]
        else:
            command = ["sh", "-c", script.replace("$$", "$").replace("&& chown -R decentral /state", "")]
        for path, volume in mounts.items():
            folder = RECIPE / "volumes" / volume
            folder.mkdir(parents=True, exist_ok=True)
            command = [re.sub(rf"(?<![\w/]){path}\b", str(folder), one) for one in command]
        if code := on(f"compose-{'first' if name == 'address' else name}", command):
            return code
    return 0


def decentral(arguments: Sequence[str]) -> int:
    """Run a command, its addresses on loopback; a peer and a page go on in the background."""
    machine = os.environ["MACHINE"]
    here = [re.sub(r"/(?:dns4|ip4)/[\w.-]+/tcp/4001", f"/ip4/127.0.0.1/tcp/{port(machine)}", one) for one in arguments]
    with (RECIPE / "calls").open("a") as calls:
        calls.write(shlex.join(here) + "\n")
    if DRY:
        return _noted(here)
    real = [sys.executable, "-m", "decentral", *here]
    if here[0] != "peer":
        _settle()
    if here[0] not in ("peer", "dashboard"):
        code = subprocess.run(real).returncode
        if here[0] == "stop":
            left = {pid: command for pid, command in background().items() if _runs(pid)}
            (RECIPE / "pids").write_text("".join(f"{pid} {command}\n" for pid, command in left.items()))
        return code
    if os.fstat(1).st_mode & 0o170000 == 0o100000:  # the recipe has sent it to the background itself
        _note(os.getpid(), here[0])
        os.execv(sys.executable, real)
    log = home(machine) / "log"
    with log.open("ab") as output:
        started = subprocess.Popen(real, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)
    _note(started.pid, here[0])
    if here[0] == "peer":
        _settle()
    else:
        _wait(lambda: "the page:" in log.read_text(), log)
    return 0


def _noted(arguments: Sequence[str]) -> int:
    """Make the files that the command would have made, and print what it would have printed first."""
    command, *flags = arguments
    given = dict(itertools.pairwise(flags))
    if command == "identity":
        print(f"{given['--address']}/p2p/QmViNS8YCd6cZzwyBLzHbkQVrWBD2AQpKcr1cceozqQ5RN")
    for name in (f"{flags[0]}.yaml" if command == "new" else "", given.get("--out", "")):
        if name:
            Path(name).touch()
    return 0


def _note(pid: int, command: str) -> None:
    with (RECIPE / "pids").open("a") as kept:
        kept.write(f"{pid} {command}\n")


def background() -> dict[int, str]:
    """Return the processes that went to the background and were not stopped, each with the command that it runs."""
    kept = RECIPE / "pids"
    lines = [line.split() for line in kept.read_text().splitlines()] if kept.exists() else []
    return {int(pid): command for pid, command in lines}


def journals() -> list[Path]:
    """Return the journals of all peers."""
    return [path for path in RECIPE.rglob("journal.jsonl") if not path.is_symlink()]


def _settle() -> None:
    """Wait until each peer in the background trains and, if there are several, two have merged what others learned."""
    peers = sum(command == "peer" for command in background().values())
    exchanging = 2 if peers > 1 else 0
    _wait(lambda: _with('"event":"step"') >= peers and _with('"outcome":"done"') >= exchanging, None)


def _with(sign: str) -> int:
    return sum(sign in one.read_text() for one in journals())


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait(happened: Any, log: Path | None) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        if time.monotonic() > deadline or not all(map(_runs, background())):
            text = "".join(one.read_text(errors="replace") for one in ([log] if log else RECIPE.rglob("*log")))
            raise SystemExit(f"a process in the background has ended, or takes too long:\n{text[-4000:]}")
        time.sleep(0.1)


def begin(_: Sequence[str]) -> int:
    """Write the stand-ins into the folder that a recipe finds first."""
    shims(RECIPE / "bin")
    return 0


def cloned(_: Sequence[str]) -> int:
    """Make the present folder a clone."""
    clone(Path.cwd())
    return 0


def finish(_: Sequence[str]) -> int:
    """End the processes in the background, of which some ignore Ctrl-C, and wait for them."""
    for pid in filter(_runs, background()):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + LIMIT_S
    while any(map(_runs, background())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))
