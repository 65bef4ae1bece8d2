"""A run's config on its way between peers: plain JSON, bounded before it is parsed, which names no file.

    config.canonical() -> Welcome, run.json -> received(text) -> adopt(own) -> config

A swarm's config may say that its model is code: as information. It becomes a Config that runs code or reads files only
by `adopt`, and only with the code and the files that this peer's own user has named.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decentral.core import config, model_families
from decentral.core.config import Config, ModelConfig
from decentral.core.errors import UserError
from decentral.core.own_inputs import OwnInputs, agreed_code
from decentral.core.plain_text import plain_text

MAX_SECTIONS = 16  # objects and lists in a config from a peer; a Config has up to twelve
MAX_VALUES = 256  # keys and members of lists; a Config has about eighty, and a model's lists


@dataclass(frozen=True, slots=True)
class ReceivedConfig:
    """A valid config, of which nothing was run or read yet. `received` makes it."""

    _settings: Config

    def adopt(self, own: OwnInputs) -> Config:
        """The config of a peer that trains. Raises UserError, with the flag, unless `own` names the code and the data
        that the run needs."""
        settings = self._settings
        agreed_code(settings.model.layers, own.model_code, "this swarm's")
        kind = settings.data.facts
        if not kind.needs_path and own.of_data():
            raise UserError(f"{own.of_data()}: this swarm trains on Python's standard library; leave the flag out")
        if kind.needs_path and own.data is None:
            raise UserError(f"this swarm trains on data of kind {kind.name}, each peer on its own: give --data PATH")
        if kind.needs_tokenizer and own.tokenizer is None and own.model_folder is None:
            raise UserError("this swarm's text is read by a tokenizer: give --tokenizer PATH, its file or folder")
        if settings.model.lora is not None and settings.model.weights is not None and own.model_folder is None:
            raise UserError("this swarm trains adapters of a model that each peer reads itself: give --model-from DIR")
        if own.model_folder is not None:
            self._check_folder(Path(own.model_folder))
        return settings.with_own(own)

    def _check_folder(self, folder: Path) -> None:
        """Raises UserError unless the folder's config.json describes this run's model. Its weights are not read yet."""
        model = self._settings.model
        if model.weights is None:
            raise UserError("--model-from: this swarm's model starts from no folder; leave the flag out")
        ours = {"context": model.context, "lora": model.lora}
        described = ModelConfig.model_validate({**model_families.model_keys(folder), **ours})
        for key, found in described:
            if key != "weights" and found != (known := getattr(model, key)):
                source = folder / model_families.CONFIG_FILE
                raise UserError(f"--model-from: {source} says model.{key} is {found}; this swarm's is {known}")

    def built_in(self) -> Config:
        """The config for a command that looks, and neither runs a model's code nor reads data. Raises UserError if the
        model is code."""
        if self._settings.model.layers is not None:
            code = plain_text(self._settings.model.layers)
            raise UserError(f"--join: this swarm's model is code, {code}, which only peers run; nothing to look at")
        return self._settings

    def facts(self) -> dict[str, str | int]:
        """What people are told of the run."""
        return facts_of(self._settings)


def facts_of(settings: Config) -> dict[str, str | int]:
    """What people are told of a run: its model, its data and how it trains, as plain values by name.

    `layers` and `parameters` are 0 where the model is code.
    """
    model, built_in = settings.model, settings.model.layers is None
    size = {"layers": len(model.layer_parameters), "parameters": sum(model.layer_parameters)} if built_in else {}
    code = plain_text(model.layers or "")
    shape: dict[str, str | int] = {"width": model.d_model, "context": model.context, "code": code}
    training = {"algorithm": settings.gossip.algorithm, "optimizer": settings.train.optimizer}
    return {"layers": 0, "parameters": 0, **size, **shape, "data": settings.data.kind, **training}


def received(text: str) -> ReceivedConfig:
    """Reads a config that came from a peer, or from run.json. Raises UserError if it is not valid."""
    size = len(text) if len(text) > config.MAX_CONFIG_BYTES else len(text.encode(errors="replace"))
    if size > config.MAX_CONFIG_BYTES:
        raise UserError(f"config: at most {config.MAX_CONFIG_BYTES} bytes; the swarm's has {size}")
    if text.count("{") + text.count("[") > MAX_SECTIONS or text.count(":") + text.count(",") > 2 * MAX_VALUES:
        raise UserError("config: the swarm's has more sections or values than any config")
    try:
        tree = json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise UserError("config: the swarm's is not plain JSON; does it run another version of decentral?") from None
    if not isinstance(tree, dict):
        raise UserError(f"config: the swarm's must be an object of sections; it is a {type(tree).__name__}")
    for section, keys in config.OWN_KEYS.items():
        for key in keys:
            if isinstance(tree.get(section), dict) and key in tree[section]:
                raise UserError(f"config: the swarm's names files of this peer ({section}.{key}), which no swarm may")
    return ReceivedConfig(config.validated(tree))


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError("a key stands twice")
    return tree
