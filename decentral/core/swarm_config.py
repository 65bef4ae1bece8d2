"""A run's config on its way between peers: plain JSON, bounded before it is parsed, which names no file.

    config.canonical() -> Welcome, run.json -> received(text) -> adopt(own) -> config

A swarm's config may say that its model is code: as information. It becomes a Config that runs code or reads files only
by `adopt`, and only with the code and the files that this peer's own user has named.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decentral.core import config
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.own_inputs import OwnInputs, agreed_code
from decentral.core.plain_text import plain_text

MAX_SECTIONS = 16  # objects and lists in a config from a peer; a Config has seven
MAX_VALUES = 256  # keys and members of lists; a Config has about sixty


@dataclass(frozen=True, slots=True)
class ReceivedConfig:
    """A valid config, of which nothing was run or read yet. `received` makes it."""

    _settings: Config

    def adopt(self, own: OwnInputs) -> Config:
        """The config of a peer that trains. Raises UserError, with the flag, unless `own` names the code and the data
        that the run needs."""
        code = agreed_code(self._settings.model.layers, own.model_code, "this swarm's")
        data = self._settings.data
        if data.kind == "python-stdlib":
            if own.data or own.data_glob:
                raise UserError("--data: this swarm trains on Python's standard library; leave the flag out")
            return self._settings
        if own.data is None:
            raise UserError(f"this swarm trains on data of kind {data.kind}, each peer on its own: give --data PATH")
        named = {"path": own.data} | ({"glob": own.data_glob} if own.data_glob else {})
        model = self._settings.model.model_copy(update={"layers": code})
        return self._settings.model_copy(update={"model": model, "data": data.model_copy(update=named)})

    def built_in(self) -> Config:
        """The config for a command that looks, and neither runs a model's code nor reads data. Raises UserError if the
        model is code."""
        if self._settings.model.layers is not None:
            code = plain_text(self._settings.model.layers)
            raise UserError(f"--join: this swarm's model is code, {code}, which only peers run; nothing to look at")
        return self._settings

    def facts(self) -> dict[str, Any]:
        """What people are told of the run."""
        return facts_of(self._settings)


def facts_of(settings: Config) -> dict[str, Any]:
    """What people are told of a run: its model, its data and how it trains, as plain values by name.

    `layers` and `parameters` are 0 where the model is code.
    """
    model, built_in = settings.model, settings.model.layers is None
    size = {"layers": len(model.layer_parameters), "parameters": sum(model.layer_parameters)} if built_in else {}
    shape = {"width": model.d_model, "context": model.context, "code": plain_text(model.layers or "")}
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
    data = tree.get("data")
    for key in config.OWN_DATA_KEYS:
        if isinstance(data, dict) and key in data:
            raise UserError(f"config: the swarm's names files of this peer (data.{key}), which no swarm may")
    return ReceivedConfig(config.validated(tree))


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError("a key stands twice")
    return tree
