"""All commands: what each does, in a line, and examples for its help.

`python -m decentral.NAME` and `decentral NAME` are the same command. A module becomes one by its place here: it has a
`parse(argv)` for its flags, and a `main(argv)` that returns an exit code. A test parses every example.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

CALL = "python -m decentral."
ADDRESS = "/ip4/192.0.2.7/tcp/4001/p2p/QmYourPeer"  # in examples: of a peer of the swarm; 192.0.2.0 is for documents


@dataclass(frozen=True, slots=True)
class Command:
    """A command's line in the overview, and what a user may type after its name."""

    does: str
    examples: tuple[str, ...]
    interrupted: int = 0  # exit code after Ctrl-C; 130 where a script would take 0 for a result that is missing


COMMANDS = {
    "peer": Command(
        "one peer: starts a swarm, joins one, or goes on where its state folder stopped",
        (
            "",
            "my-config.yaml --set train.micro_batch=32 --state-dir mine",
            f"--join {ADDRESS} --region lisbon",
            f"--join {ADDRESS} --data books/ --memory 8GB --device cuda",
            "--listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/203.0.113.7/tcp/4001",
            "--state-dir swarm/peer-1",
        ),
    ),
    "local": Command(
        "a whole swarm as processes on this machine",
        (
            "--peers 4 --throttle 1,1,1,10 --stop-after 90s --summary summary.json",
            "small --peers 3 --memory 8GB,2GB,2GB --state-dir kept",
        ),
    ),
    "doctor": Command(
        "why a peer does not start, join or average, and what to do",
        ("", f"--join {ADDRESS}", "--state-dir swarm/peer-1 --json"),
        interrupted=130,
    ),
    "dashboard": Command(
        "a live page in a browser: a swarm as a visitor sees it, or from journals",
        (
            f"--join {ADDRESS}",
            f"--join {ADDRESS} --invite look.invite --at 9000",
            f"--join {ADDRESS} --serve-model",
            "--serve-model my-model",
        ),
    ),
    "report": Command(
        "a page about a run from its journals; with charts where matplotlib is installed",
        ("swarm", "swarm/peer-1 swarm/peer-2 -o run.html"),
    ),
    "tokenize": Command(
        "a file of tokens from text, Parquet, JSON lines or Arrow",
        ("my-text --train 8192 --out words.bin", "a.parquet --tokenizer my-model --out words.bin"),
    ),
    "plan": Command(
        "who should hold which layers and talk with whom, for a topology or a live swarm",
        (
            "eight-cities",
            "my-swarm.yaml --model small --objective throughput --plot plan.png",
            "spot --compare --seconds 10",
            f"--join {ADDRESS} --json",
        ),
        interrupted=130,
    ),
    "simulate": Command(
        "a swarm of up to thousands in virtual time, with faults",
        (
            "--peers 6 --throttle 1,1,1,10 --seconds 120",
            '--peers 6 --seconds 120 --faults "crash 2 at 40; restart 2 at 50" --plot run.png',
            "--peers 1000 --seconds 300 --json",
            "--sweep 300",
        ),
    ),
    "invite": Command(
        "invitations to a private swarm: makes, lists and revokes them",
        (
            "--state-dir mine --for ann --until 30d --may train --out ann.invite",
            "--state-dir mine --list",
            "--state-dir mine --revoke ann.invite",
        ),
    ),
    "identity": Command(
        "a peer's id before it starts, so that others can be told where to join",
        ("--state-dir first", "--state-dir first --address /dns4/first.example.org/tcp/4001"),
    ),
    "export": Command(
        "the swarm's model as a folder for transformers",
        (f"--join {ADDRESS} --out my-model", "--state-dir swarm/peer-1 swarm/peer-2 --out my-model"),
    ),
    "generate": Command(
        "text from the swarm's model, computed on this machine",
        (
            f'--join {ADDRESS} "def main("',
            '--state-dir swarm/peer-1 --temperature 0 "def main("',
            '--model my-model --max-tokens 500 --seed 7 "Once upon a time"',
        ),
        interrupted=130,
    ),
    "audit": Command(
        "from the journals: was every micro-batch counted once?",
        ("swarm", "swarm/peer-1 swarm/peer-2"),
    ),
}


def module_of(name: str) -> ModuleType:
    """Return the module of a command, which is loaded only here."""
    return import_module(f"decentral.commands.{name}")


def examples(prog: str) -> list[str]:
    """Whole lines for the help of the command that is called `prog`, such as `python -m decentral.peer`."""
    known = COMMANDS.get(prog.removeprefix(CALL))
    return [f"{prog} {flags}".rstrip() for flags in known.examples] if known else []
