"""python -m decentral.new: write a config for a goal, with a comment for each key that it sets.

python -m decentral.new                                       asks a few questions, on a terminal
python -m decentral.new mine --model 125M --data books --peers "4x4090 homes, 8xA100 oregon" --tokens 10B

The file has only the keys that differ from their defaults.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from decentral.commands import shared
from decentral.commands.config import comment
from decentral.commands.estimates import places, sizes
from decentral.commands.estimates.places import PeerGroup
from decentral.core import config, own_yaml, quantities
from decentral.core.choices import DATA_KINDS, FILES_OF_ROWS
from decentral.core.config import Config, DataConfig
from decentral.core.config_keys import keys_of
from decentral.core.errors import UserError, writing
from decentral.core.own_inputs import OwnInputs
from decentral.core.strict_json import JsonObject
from decentral.core.units import readable_number

AUTO_SEQUENCES = 16  # a micro-batch is assumed to have this many sequences if `train.micro_batch` is auto
TOKEN_FILES = (".bin", ".npy")


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the new config, its value, and why it has that value."""

    path: str
    value: str | float
    why: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    asks = sys.stdin is not None and sys.stdin.isatty() and flags.model is None and flags.model_from is None
    if asks:
        with shared.if_interrupted("nothing written"):
            _ask_for(flags, input)
    if flags.model is None and flags.model_from is None:
        raise UserError("give --model SIZE, such as 125M, or --model-from DIR; on a terminal this command asks")
    name = flags.name or "mine"
    file = Path(flags.out or f"{name}.yaml")
    text = text_of(name, flags)
    if file.exists():
        raise UserError(f"{file} exists already; choose another NAME, or another file with --out")
    with writing("--out", file), file.open("x", encoding="utf-8") as out:  # "x" follows no link and replaces no file
        out.write(text)
    if flags.data and not (Path(flags.data).exists() or _is_on_hub(flags.data)):
        print(f"note: {flags.data} is not here yet; a peer needs it when it starts")
    peers = f' --peers "{flags.peers}"' if flags.peers else " --peers ..."
    peers += f" --tokens {flags.tokens:.15g}" if flags.tokens else ""
    commands = (f"python -m decentral.estimate {file}{peers}", f"python -m decentral.peer {file}")
    print(shared.as_called("\n    ".join((f"{file}; what it reaches, and how to begin:", *commands))))


def _ask_for(flags: argparse.Namespace, ask: Callable[[str], str]) -> None:
    """Ask the user for the values that the flags lack, and set them in `flags`.

    An empty answer means the default, which stands in brackets. `ask` shows a question and returns the answer.
    """

    def answer(question: str, usual: str) -> str:
        return ask(f"{question} [{usual}]: ").strip() or usual

    given = vars(flags)
    given["name"] = flags.name or answer("Name of the run", "mine")
    given["model"] = answer("Size of the model, such as 125M", "10M")
    if flags.data is None:
        data = answer("Data: a text file or folder, rows, tokens; none: Python's library", "none")
        given["data"] = None if data == "none" else data
    if flags.peers is None:
        given["peers"] = answer("Peers, such as 4x4090 homes:50/500, 8xA100 oregon", "2xcpu here")
    if flags.tokens is None:
        given["tokens"] = _tokens(answer("Tokens to train, of one byte each without a tokenizer", "100M"))


def _tokens(text: str) -> float:
    try:
        return quantities.count(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"tokens to train: {error}") from None


def text_of(name: str, flags: argparse.Namespace) -> str:
    """Return the config as YAML with comments.

    Args:
        name: Name of the run.
        flags: The command's flags.

    Raises:
        UserError: If a flag is not valid, or a peer would refuse the resulting config.
    """
    groups = places.groups_of(flags.peers) if flags.peers else []
    settings = [Setting("name", name, "")]
    settings += _of_data(flags)
    settings += _of_model(flags, settings)
    settings += _of_training(flags, groups, settings)
    for path, value in _set(flags):
        settings = [one for one in settings if one.path != path]
        settings.append(Setting(path, value, "You asked for it."))
    body = "\n".join(_lines(settings))
    head = (
        f"The run {name}: {_goal(flags, groups)}.",
        "All keys: decentral config. Keys at their defaults are left out.",
    )
    text = "\n".join([*comment(head, ""), body, ""])
    _check(text, flags)
    return text


def _plain(path: str, value: str) -> str | float:
    """Return the value of --set; raise UserError if it is no scalar."""
    try:
        found = own_yaml.value(value)
    except ValueError:
        found = None
    if not isinstance(found, str | int | float):
        raise UserError(f"--set {path}: expected a number, a text, true or false; got {value!r}")
    return found


def _check(text: str, flags: argparse.Namespace) -> None:
    """Raise UserError if a peer would refuse the config."""
    tree = own_yaml.mapping(text, "the new config")
    if flags.model_from is None:
        config.validated(tree)
    else:
        overrides = [f"{section}.{key}={_yaml(value)}" for section, keys in tree.items() if isinstance(keys, dict)
                     for key, value in keys.items() if section != "model"]  # fmt: skip
        config.load(None, overrides, OwnInputs(model_folder=flags.model_from))


def _goal(flags: argparse.Namespace, groups: Sequence[PeerGroup]) -> str:
    model = f"the model in {flags.model_from}" if flags.model_from else f"a model of {flags.model}"
    data = flags.data or "Python's standard library"
    by = f", by {', '.join(group.text for group in groups)}" if groups else ""
    return f"{model} on {data}{by}"


def _of_data(flags: argparse.Namespace) -> Iterator[Setting]:
    """Yield the settings of the data, by the name of the file or folder."""
    if flags.data is None:
        if flags.model_from:
            raise UserError("--model-from needs --data: a data set for the model's tokenizer")
        return
    kind, why = _kind(flags)
    yield Setting("data.kind", kind, why)
    yield Setting("data.path", flags.data, "This peer's own data; others name theirs by --data.")
    if flags.tokenizer:
        yield Setting("data.tokenizer", flags.tokenizer, "This peer's copy; all peers need the same one.")


def _kind(flags: argparse.Namespace) -> tuple[str, str]:
    """Return the `data.kind` that fits the name of the data, and why."""
    path = Path(flags.data)
    if path.suffix in TOKEN_FILES:
        return "tokens", "The file has tokens already."
    rows = path.suffix in FILES_OF_ROWS or any(any(path.glob(f"**/*{suffix}")) for suffix in FILES_OF_ROWS)
    if not (rows or _is_on_hub(flags.data) or flags.tokenizer or flags.model_from):
        return "text", "Each byte is a token, so no tokenizer is needed."
    if not (flags.tokenizer or flags.model_from):
        raise UserError(f"--data {flags.data}: rows of text need --tokenizer PATH, a tokenizer.json or its folder")
    return "huggingface", "Rows of text, which the run's tokenizer turns into tokens."


def _is_on_hub(data: str) -> bool:
    """Return whether the name of the data is that of a data set on Hugging Face, not of a file here."""
    return "/" in data and not Path(data).exists() and not Path(data).is_absolute() and not data.startswith(".")


def _of_model(flags: argparse.Namespace, before: Sequence[Setting]) -> Iterator[Setting]:
    """Yield the settings of the model: the folder of --model-from, or a shape with about the size of --model."""
    if flags.model_from:
        yield Setting("model.from", flags.model_from, "The weights and the shape to start from.")
        return
    if not sizes.is_size(flags.model):
        raise UserError(f"--model {flags.model}: expected a number of parameters, such as 125M or 1.3B")
    kind = next((one.value for one in before if one.path == "data.kind"), DataConfig().kind)
    vocabulary = config.BYTES if DATA_KINDS[str(kind)].is_bytes else sizes.TOKENIZER_VOCABULARY
    given = next((text.partition("=")[2] for text in flags.set if text.startswith("model.vocabulary=")), None)
    if given:
        wanted = _plain("model.vocabulary", given)
        if not isinstance(wanted, int):
            raise UserError(f"--set model.vocabulary: expected a whole number; got {given!r}")
        vocabulary = wanted
    if vocabulary != config.BYTES:
        yield Setting("model.vocabulary", vocabulary, "At least as many as the tokenizer has.")
    shape = sizes.shape_of(flags.model, vocabulary)
    run = config.validated({"model": {**shape, "vocabulary": vocabulary}})
    parameters = readable_number(sum(run.model.layer_parameters))
    yield Setting("model.depth", shape["depth"], f"With this width the model has {parameters} parameters.")
    yield Setting("model.width", shape["width"], "")
    yield Setting("model.context", sizes.CONTEXT, "Longer sequences teach longer dependencies, and take more memory.")


def _of_training(
    flags: argparse.Namespace, groups: Sequence[PeerGroup], before: Sequence[Setting]
) -> Iterator[Setting]:
    """Yield the settings of training: the micro-batch, and the end of the schedule."""
    if not groups:
        return
    run = _planned(flags, groups, before)
    micro_batch, accumulate = run.train.micro_batch, run.train.accumulate
    sequences = accumulate * (AUTO_SEQUENCES if micro_batch == "auto" else micro_batch)
    fits = "The largest number, up to 16, with which each device that can hold the model has room for it."
    yield Setting(
        "train.micro_batch", micro_batch, "Each device finds its fastest number." if micro_batch == "auto" else fits
    )
    yield Setting("train.accumulate", accumulate, f"A step of a peer then has {sequences} sequences.")
    if flags.tokens:
        peers = sum(group.count for group in groups)
        steps = max(1, round(flags.tokens / (sequences * run.model.context * peers)))
        why = f"{readable_number(flags.tokens)} tokens by {peers} peers, each with {sequences} sequences a step."
        yield Setting("train.total_steps", steps, f"{why} The rate falls until then; peers go on afterwards.")


def _planned(flags: argparse.Namespace, groups: Sequence[PeerGroup], before: Sequence[Setting]) -> Config:
    """Return a config with the model's shape and the steps that peers will take, as `decentral.estimate` counts them.

    Raises:
        UserError: If a value of --set is not valid.
    """
    are_others = any(not group.is_own for group in groups)
    tree: JsonObject = {"model": {"context": sizes.CONTEXT}, "train": {"micro_batch": "auto"} if are_others else {}}
    for path, value in (*((one.path, one.value) for one in before), *_set(flags)):
        section, _, key = path.partition(".")
        if section in tree and path != "model.from":
            tree[section][key] = value
    run = config.validated(tree)
    if flags.model_from or not are_others:
        return run
    from decentral.commands.estimates.peer_devices import with_micro_batch  # loads torch, which takes seconds

    return with_micro_batch(run, groups)


def _set(flags: argparse.Namespace) -> list[tuple[str, str | float]]:
    """Return (path, value) of each --set. Raises UserError if one of them is no key=value with a scalar."""
    if wrong := next((text for text in flags.set if "=" not in text), None):
        raise UserError(f"--set expects key=value, such as gossip.window_s=2; got {wrong!r}")
    parts = [text.partition("=") for text in flags.set]
    return [(path.strip(), _plain(path, value)) for path, _, value in parts]


def _lines(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield the YAML of the settings that differ from the defaults, each below its key's meaning and its reason."""
    known, defaults = {key.path: key for key in keys_of(Config)}, Config().model_dump(by_alias=True)
    section = ""
    order = [key.path.partition(".")[0] for key in known.values()]
    for one in sorted(settings, key=lambda setting: _place(setting.path, order)):
        parent, dot, leaf = one.path.partition(".")
        usual = defaults.get(parent) if not dot else (defaults.get(parent) or {}).get(leaf)
        if usual == one.value:
            continue
        if dot and parent != section:
            yield f"{parent}:"
            section = parent
        margin, key = "  " * bool(dot), known.get(one.path)
        unit = f" Unit: {key.unit}." if key and key.unit else ""
        yield from comment((f"{key.meaning}{unit}" if key else "", one.why), margin)
        yield f"{margin}{leaf or parent}: {_yaml(one.value)}"


def _yaml(value: str | float) -> str:
    """Return a value as one line of YAML, which unlike JSON has no surrogate pairs for characters such as emoji."""
    if isinstance(value, str):
        return str(yaml.safe_dump(value, default_style='"', width=math.inf)).rstrip("\n")
    return json.dumps(value)


def _place(path: str, order: Sequence[str]) -> int:
    """Return the place of a key's section among all sections; an unknown section comes first, and is refused later."""
    section = path.partition(".")[0]
    return order.index(section) if section in order else -1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Write a config for a goal, with a comment for each key. Without --model, on a terminal, it asks."
    parser = shared.Parser(prog="python -m decentral.new", description=about)
    name = "name of the run, and of the file NAME.yaml; default: mine"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name)
    parser.add_argument("--model", metavar="SIZE", help="parameters of the model, such as 125M or 1.3B")
    parser.add_argument("--model-from", metavar="DIR", help="a Hugging Face folder whose weights the run starts from")
    parser.add_argument("--data", metavar="PATH", help="text, rows or tokens; default: Python's standard library")
    parser.add_argument("--tokenizer", metavar="PATH", help="the run's tokenizer, for rows of text")
    peers = "as for decentral.estimate: 4x4090 homes:50/500, 8xA100 oregon"
    parser.add_argument("--peers", metavar="PEERS", help=peers)
    parser.add_argument("--tokens", type=quantities.count, metavar="N", help="tokens to train, such as 10B")
    shared.add_set_flag(parser, "set a further key")
    parser.add_argument("--out", metavar="FILE", help="file to write; default: NAME.yaml")
    flags = parser.parse_args(argv)
    if flags.model and flags.model_from:
        raise UserError("give --model or --model-from, not both")
    return flags


if __name__ == "__main__":
    sys.exit(main())
