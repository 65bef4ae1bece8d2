"""The table of all commands, each with one line of help and examples.

`python -m decentral.NAME` and `decentral NAME` are the same command. An entry here makes the module NAME a command: it
has a `parse(argv)` for its flags, and a `main(argv)` that returns an exit code. A test parses every example.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

CALL = "python -m decentral."
ADDRESS = "/ip4/192.0.2.7/tcp/4001/p2p/QmYourPeer"  # a peer's address in examples; 192.0.2.0/24 is for documentation


@dataclass(frozen=True, slots=True)
class Command:
    """A command's line in the overview of all commands, and its examples."""

    does: str
    examples: tuple[str, ...]  # flags and arguments that a user may type after the command's name


COMMANDS = {
    "peer": Command(
        "run one peer: start a swarm, join one, or continue from a state folder",
        (
            "",
            "my-config.yaml --set train.micro_batch=32 --state-dir mine",
            f"--join {ADDRESS} --region lisbon",
            f"--join {ADDRESS} --data books/ --memory 8GB --device cuda",
            "--listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/203.0.113.7/tcp/4001",
            "--state-dir mine --upload s3://bucket/runs --upload-rate 20Mb/s",
            "--resume-from s3://bucket/runs --state-dir new",
            "--state-dir swarm/peer-1",
        ),
    ),
    "local": Command(
        "run a whole swarm as processes on this machine",
        (
            "--peers 4 --throttle 1,1,1,10 --stop-after 90s --summary summary.json",
            "small --peers 3 --memory 8GB,2GB,2GB --state-dir kept",
        ),
    ),
    "ps": Command("list the peers that run on this machine, whoever started them", ("", "--json")),
    "stop": Command(
        "make peers on this machine save, leave and end",
        ("ann", "swarm/peer-1", "--all"),
    ),
    "estimate": Command(
        "predict what a swarm can train, how fast, and at what price, before it exists",
        (
            '--peers "4x4090 homes:50/500, 8xA100-80GB oregon"',
            '--model 1.3B --peers "4x4090 homes:50/500, 8xA100 oregon" --tokens 10B --price 4090=0.35,A100=1.2',
            'small --peers "4xcpu" --json',
        ),
    ),
    "new": Command(
        "write a config for a goal, with a comment for each key that it sets",
        ("", 'mine --model 125M --data books --peers "4x4090 homes, 8xA100 oregon" --tokens 10B'),
    ),
    "config": Command(
        "print every key of a config with its meaning, default, unit and range",
        ("", "--explain gossip.window_s"),
    ),
    "doctor": Command(
        "find out why a peer does not start, join or average, and what to do",
        ("", f"--join {ADDRESS}", "--state-dir swarm/peer-1 --json"),
    ),
    "dashboard": Command(
        "serve a live page about a swarm, as a visitor or from its journals",
        (
            f"--join {ADDRESS}",
            f"--join {ADDRESS} --invite look.invite --at 9000",
            f"--join {ADDRESS} --serve-model",
            "--serve-model my-model",
        ),
    ),
    "report": Command(
        "write a page about a run from its journals, with charts if matplotlib is installed",
        ("swarm", "swarm/peer-1 swarm/peer-2 -o run.html"),
    ),
    "tokenize": Command(
        "turn text or rows of text into a file of tokens",
        ("my-text --train 8192 --out words.bin", "a.parquet --tokenizer my-model --out words.bin"),
    ),
    "plan": Command(
        "plan which peers hold which layers, for a topology file or a running swarm",
        (
            "eight-cities",
            "my-swarm.yaml --model small --objective throughput --plot plan.png",
            "spot --compare --seconds 10",
            f"--join {ADDRESS} --json",
        ),
    ),
    "simulate": Command(
        "simulate a swarm of up to thousands of peers in virtual time, with faults",
        (
            "--peers 6 --throttle 1,1,1,10 --seconds 120",
            '--peers 6 --seconds 120 --faults "crash 2 at 40; restart 2 at 50" --plot run.png',
            "--peers 1000 --seconds 300 --json",
            "--sweep 300",
        ),
    ),
    "invite": Command(
        "make, list and revoke invitations to a private swarm",
        (
            "--state-dir mine --for ann --until 30d --may train --out ann.invite",
            "--state-dir mine --list",
            "--state-dir mine --revoke ann.invite",
        ),
    ),
    "identity": Command(
        "print a peer's id before the peer starts, so that others can be told where to join",
        ("--state-dir first", "--state-dir first --address /dns4/first.example.org/tcp/4001"),
    ),
    "export": Command(
        "write the swarm's model as a folder for transformers",
        (f"--join {ADDRESS} --out my-model", "--state-dir swarm/peer-1 swarm/peer-2 --out my-model"),
    ),
    "push": Command(
        "copy a checkpoint or an exported model to a folder, a bucket or the Hugging Face Hub",
        (
            "swarm/peer-1 s3://bucket/runs --keep 3 --rate 20Mb/s",
            "my-model hf://me/my-model",
            "swarm/peer-1 /mnt/backup",
        ),
    ),
    "compare": Command(
        "compare runs: losses at equal tokens and time, settings, and who trained what",
        ("muon adamw", "swarm/peer-1 other/peer-1 third --json"),
    ),
    "generate": Command(
        "generate text from the swarm's model on this machine",
        (
            f'--join {ADDRESS} "def main("',
            '--state-dir swarm/peer-1 --temperature 0 "def main("',
            '--model my-model --max-tokens 500 --seed 7 "Once upon a time"',
        ),
    ),
    "ledger": Command(
        "show what each peer has contributed, by what other peers measured",
        (f"--join {ADDRESS}", "swarm", "swarm/peer-1 swarm/peer-2 --json"),
    ),
    "audit": Command(
        "check from the journals that every micro-batch was counted once",
        ("swarm", "swarm/peer-1 swarm/peer-2"),
    ),
}


def module_of(name: str) -> ModuleType:
    """Import and return the module of a command."""
    return import_module(f"decentral.commands.{name}")


def examples(prog: str) -> list[str]:
    """Return a command's example lines. `prog` is how users call the command, such as `python -m decentral.peer`."""
    known = COMMANDS.get(prog.removeprefix(CALL))
    return [f"{prog} {flags}".rstrip() for flags in known.examples] if known else []
