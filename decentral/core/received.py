"""Read a config that another peer sent. It must be plain JSON of a bounded size, and must not name files.

    config.canonical() -> Welcome, run.json -> received(text) -> adopt(own) -> config

A swarm's config may name code as its model, but reading the config does not run the code. Only `adopt` makes a Config
that runs code or reads files, and only with the code and files that this peer's own user named.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decentral.core import config
from decentral.core.config import Config, ModelConfig
from decentral.core.errors import UserError
from decentral.core.own_inputs import NOTHING_NAMED, OwnInputs, agreed_code
from decentral.core.plain_text import plain_text
from decentral.model import families

MAX_SECTIONS = 16  # a received config with more objects and lists is refused; a valid config has at most twelve
MAX_VALUES = 256  # a received config with more keys and list members is refused; a valid config has about eighty


@dataclass(frozen=True, slots=True)
class ReceivedConfig:
    """A swarm's config that `received` has validated. No code or file that the config names has been run or read."""

    _settings: Config

    def adopt(self, own: OwnInputs) -> Config:
        """Return the config of a peer that trains, completed with the user's own code and files.

        Raises:
            UserError: If `own` lacks code or files that the run needs, names code or files that the run does not use,
                or names a folder of another model.
        """
        settings = self._settings
        agreed_code(settings.model.layers, own.model_code, "this swarm's")
        kind = settings.data.facts
        if not kind.needs_path and own.of_data():
            raise UserError(f"{own.of_data()}: this swarm trains on Python's standard library; leave the flag out")
        if kind.needs_path and own.data is None:
            raise UserError(f"each peer of this swarm trains on its own data of kind {kind.name}: give --data PATH")
        if kind.needs_tokenizer and own.tokenizer is None and own.model_folder is None:
            raise UserError("this swarm needs a tokenizer for its text: give --tokenizer PATH, its file or folder")
        if settings.model.lora is not None and settings.model.weights is not None and own.model_folder is None:
            raise UserError("this swarm trains adapters, and each peer needs the base model: give --model-from DIR")
        if own.model_folder is not None:
            self._check_folder(Path(own.model_folder))
        return settings.with_own(own)

    def _check_folder(self, folder: Path) -> None:
        """Raise UserError unless the folder's config.json describes this run's model; the weights are not read."""
        model = self._settings.model
        if model.weights is None:
            raise UserError("--model-from: this swarm's model does not start from a folder; leave the flag out")
        ours = {"context": model.context, "lora": model.lora}
        described = ModelConfig.model_validate({**families.model_keys(folder), **ours})
        for key, found in described:
            if key != "weights" and found != (known := getattr(model, key)):
                source = folder / families.CONFIG_FILE
                raise UserError(f"--model-from: {source} says model.{key} is {found}; in this swarm it is {known}")

    def built_in(self, own: OwnInputs = NOTHING_NAMED) -> Config:
        """Return the config for a command that only reads, and never runs code that a config names.

        Args:
            own: The files that the command's user named.

        Raises:
            UserError: If the run's model is Python code (`model.layers`), or `own` names a folder of another model.
        """
        if self._settings.model.layers is not None:
            code = plain_text(self._settings.model.layers)
            remedy = "use a run with a built-in model"
            raise UserError(f"this run's model is Python code ({code}), which only its peers execute; {remedy}")
        if own.model_folder is not None:
            self._check_folder(Path(own.model_folder))
        return self._settings.with_own(own)

    @property
    def synchronous(self) -> bool:
        """Whether all peers of the run take each step together."""
        return self._settings.synchronous

    def canonical(self) -> str:
        """Return the keys that all peers share as sorted JSON; see `Config.canonical`."""
        return self._settings.canonical()

    def facts(self) -> dict[str, str | int]:
        """Return the run's facts for the dashboard and reports; see `facts_of`."""
        return facts_of(self._settings)


def facts_of(settings: Config) -> dict[str, str | int]:
    """Return the model, data, algorithm and optimizer of a run by name, for the dashboard and reports.

    `layers` and `parameters` are 0 if the model is code.
    """
    model, built_in = settings.model, settings.model.layers is None
    size = {"layers": len(model.layer_parameters), "parameters": sum(model.layer_parameters)} if built_in else {}
    code = plain_text(model.layers or "")
    shape: dict[str, str | int] = {"width": model.d_model, "context": model.context, "code": code}
    training = {"algorithm": settings.gossip.algorithm, "optimizer": settings.train.optimizer}
    return {"layers": 0, "parameters": 0, **size, **shape, "data": settings.data.kind, **training}


def received(text: str) -> ReceivedConfig:
    """Read a config in canonical JSON, from another peer or from run.json.

    Raises:
        UserError: If the text is too large, is not plain JSON, names files, or is not a valid config.
    """
    size = len(text) if len(text) > config.MAX_CONFIG_BYTES else len(text.encode(errors="replace"))
    if size > config.MAX_CONFIG_BYTES:
        raise UserError(f"config: the swarm's config must have at most {config.MAX_CONFIG_BYTES} bytes; it has {size}")
    if text.count("{") + text.count("[") > MAX_SECTIONS or text.count(":") + text.count(",") > 2 * MAX_VALUES:
        raise UserError("config: the swarm's config has too many values; install the decentral version of the swarm")
    try:
        tree = json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise UserError("config: the swarm's config is not JSON; does it run another version of decentral?") from None
    if not isinstance(tree, dict):
        raise UserError(f"config: the swarm's config must be an object of sections; it is a {type(tree).__name__}")
    for section, keys in config.OWN_KEYS.items():
        for key in keys:
            if isinstance(tree.get(section), dict) and key in tree[section]:
                raise UserError(f"config: the swarm's config sets {section}.{key}, which only a peer's user may set")
    return ReceivedConfig(config.validated(tree))


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not valid in JSON")


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return tree
