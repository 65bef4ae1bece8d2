"""One strict YAML describes a run. An unknown key fails and names the nearest valid one.

The peer that starts a run loads the file; the others take it from the swarm in its canonical form
(decentral/core/received.py). A setting of one peer alone (device, state folder, throttle) is a flag, never a key.

Every number and text has bounds, for a stranger may have sent it: none may fill a memory or keep a core busy. Where
several together make something large, a validator bounds their product.
"""

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from decentral.core import own_yaml
from decentral.core.choices import ALGORITHMS, DATA_KINDS, OPTIMIZERS, DataKind
from decentral.core.config_values import (
    Digest,
    Interval,
    Large,
    OwnPath,
    Positive,
    PositiveFloat,
    Steps,
    Strict,
)
from decentral.core.errors import UserError
from decentral.core.near_names import did_you_mean
from decentral.core.own_inputs import NOTHING_NAMED, OwnInputs, agreed_code
from decentral.core.plain_text import printable
from decentral.model import families
from decentral.model.shape import ModelConfig as ModelConfig

MAX_YAML_BYTES = 64 * 1024  # of a user's own YAML
MAX_CONFIG_BYTES = 8 * 1024  # of the canonical form, which travels; the longest valid one has about 2 KiB
BYTES = 256  # tokens, where each is a byte
MAX_BATCH_TOKENS = 1 << 24  # of one micro-batch, and of one evaluation: 128 MiB of token numbers
OWN_KEYS = {  # they name a peer's own files, or what is in them, and do not travel
    "model": ("from",),
    "data": ("path", "glob", "column", "part", "tokenizer"),
}
LATER_KEYS = (("model", "block"),)  # (section, key) added later; left out of the digest while at their defaults
# By section: keys of earlier versions, and the only value that a config may still give them
RETIRED_KEYS: dict[str, dict[str, float]] = {
    "train": {"final_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "logits_at_once": 1 << 25},
    "gossip": {"momentum": 0.0, "step": 1.0, "consensus": 1.0, "consensus_every": 3, "max_age_s": 60.0},
    "routes": {"sums": 4},
    "swarm": {"max_peers": 4096, "record_ttl_s": 60.0, "renew_s": 20.0, "refresh_s": 4.0, "shards": 1},
}
MAX_ROUND = 256  # micro-batches of a synchronous round, because one peer's report names them all
SEALED_SUMS = 4  # sealed sums of gradients that may wait at once, with `routes.overlap`
_BRANCHES = {"int", "float", "constrained-int", "constrained-float", "literal['auto']"}  # of a key with several types
_SHORT = reprlib.Repr()  # shows a wrong value with at most six entries, or thirty characters of a text
_SHORT.maxlevel = 2


if TYPE_CHECKING:
    AlgorithmName = str
    DataKindName = str
    OptimizerName = str
else:  # the names in the tables of core/choices.py
    AlgorithmName, DataKindName, OptimizerName = Literal[*ALGORITHMS], Literal[*DATA_KINDS], Literal[*OPTIMIZERS]


class DataConfig(Strict):
    """Where the tokens come from: data/corpora.py."""

    kind: DataKindName = "python-stdlib"
    path: OwnPath | None = None  # a file or folder on this peer's own disk; huggingface: or a data set's name
    glob: Annotated[str, Field(max_length=256)] | None = None  # which files of a folder; text: **/*.txt
    # huggingface: what a row is. chat: a list of messages, of which the assistant's are learned; completion: a prompt
    # and what is to follow it, which alone is learned
    format: Literal["text", "chat", "completion"] = "text"
    column: Annotated[str, Field(max_length=256)] = "text"  # huggingface: of the rows, where the text or messages are
    part: Annotated[str, Field(pattern=r"^[1-9]\d{0,3}/[1-9]\d{0,3}$", max_length=9)] | None = None  # k/n, as below
    tokenizer: OwnPath | None = None  # huggingface: its file or folder; None: that of model.from
    tokenizer_digest: Digest | None = None  # of the tokenizer that all peers have
    token_bytes: Literal[2, 4] = 2  # width of an entry of a tokens file
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05  # share of the tokens that no peer trains on

    @property
    def facts(self) -> DataKind:
        """What data of this kind need and give."""
        return DATA_KINDS[self.kind]

    @model_validator(mode="after")
    def format_is_read(self) -> "DataConfig":
        if self.format != "text" and not self.facts.has_formats:
            raise ValueError(f"data.format {self.format} needs data.kind huggingface; it is {self.kind}")
        return self

    @model_validator(mode="after")
    def part_is_one(self) -> "DataConfig":
        """Of n peers with `part` 1/n to n/n no two read the same rows."""
        if self.part and int(self.part.split("/")[0]) > int(self.part.split("/")[1]):
            raise ValueError(f"part expects k/n with k from 1 to n; it is {self.part}")
        return self


class TrainConfig(Strict):
    """The inner steps of each peer. The first three keys save the device's memory."""

    weights: Literal["float32", "bfloat16"] = "float32"  # and gradients; bfloat16 is rounded stochastically
    moments: Literal["float32", "int8"] = "float32"  # of AdamW's matrices; int8 needs bitsandbytes: decentral[8bit]
    recompute: bool = False  # a block's activations are computed again in the backward pass, not kept
    micro_batch: Positive | Literal["auto"] = 8  # sequences; auto: the fastest number that fits the device
    accumulate: Positive = 1  # micro-batches in one inner step; with `gossip.algorithm: synchronous` of the whole swarm
    # Muon trains the matrices between the first and the last layer, AdamW all else: docs/CONVERGENCE.md
    optimizer: OptimizerName = "muon"  # of the matrices between the first and last layer: AdamW has the rest
    learning_rate: PositiveFloat | Literal["auto"] = "auto"  # auto: `Optimizer.peak_rate` in core/choices.py
    warmup_steps: Steps = 50
    total_steps: Large | None = None  # the learning rate's decay ends here; None: it is constant after the warm-up
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.1
    clip_norm: PositiveFloat = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, else float32
    compile: bool = False  # torch.compile, on CUDA only
    eval_every_s: Interval = 15.0
    eval_sequences: Positive = 64
    emulated_micro_batch_s: Annotated[float, Field(ge=0, le=3600)] = 0.0  # a micro-batch takes at least this long

    @property
    def peak_rate(self) -> float:
        """The learning rate between warm-up and decay."""
        return OPTIMIZERS[self.optimizer].peak_rate if self.learning_rate == "auto" else self.learning_rate


class GossipConfig(Strict):
    """What the numbers do, and why these: docs/CONVERGENCE.md."""

    # A name in core/choices.py. With `synchronous` nothing is averaged but gradients, before each step
    # (docs/ROUTES.md): of the settings below it uses fragment_parameters alone.
    algorithm: AlgorithmName = "pull"
    window_s: Interval = 0.5
    start_window_s: Interval = 0.125  # in the first start_steps of the swarm, when replicas drift apart fastest
    start_steps: Steps = 100
    # Of pull's pseudo-gradients: four bits a number, its sign alone, or signs where a peer's link is thin
    code: Literal["auto", "q4", "q1"] = "auto"
    partners: Annotated[int, Field(gt=0, le=64)] = 3  # pulled from in each window
    link_share: Annotated[float, Field(gt=0, le=1)] = 0.8  # of the bandwidth that gossip may use
    core_share: Annotated[float, Field(gt=0, le=1)] = (
        0.02  # of the cores that train, likewise; start_steps may use more
    )
    fragment_parameters: Large = 65_536  # layers smaller than this share a fragment


class RoutesConfig(Strict):
    """How micro-batches travel between peers that hold a part of the model each."""

    # Codec of activations and their gradients. int8-q4: activations in 8 bits, gradients in 4. auto: that where our own
    # link is thin, else bf16.
    wire: Literal["auto", "bf16", "int8", "int8-q4", "fp32"] = "bf16"
    holders: Annotated[int, Field(gt=0, le=4096)] = (
        2  # a peer gives up no layer that fewer others hold, unless it takes lost layers instead
    )
    overlap: bool = False  # micro-batches begin before the step of the last ones is taken: docs/ROUTES.md has the cost

    @property
    def slots(self) -> int:
        """How many sealed sums may wait. Without overlap, one that waits is applied before any later forward pass."""
        return SEALED_SUMS if self.overlap else 1


class SwarmConfig(Strict):
    """How peers find each other, and how often they save."""

    checkpoint_every_s: Interval = 30.0


class Config(Strict):
    """A run: all peers of a swarm have the same one."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$", max_length=41)] = "stdlib-gpt"
    seed: Annotated[int, Field(ge=-(1 << 62), lt=1 << 62)] = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    gossip: GossipConfig = GossipConfig()
    routes: RoutesConfig = RoutesConfig()
    swarm: SwarmConfig = SwarmConfig()

    @property
    def synchronous(self) -> bool:
        """Whether all peers take the same step, with the gradients of all: comm/rounds/round.py."""
        return ALGORITHMS[self.gossip.algorithm].exact

    @model_validator(mode="after")
    def rounds_are_possible(self) -> "Config":
        if self.train.accumulate > MAX_ROUND and self.synchronous:
            raise ValueError(f"train.accumulate is at most {MAX_ROUND} where gossip.algorithm is synchronous")
        if self.routes.overlap and self.synchronous:
            raise ValueError("routes.overlap is for asynchronous steps; gossip.algorithm is synchronous")
        if self.synchronous and (self.train.weights, self.train.moments) != ("float32", "float32"):
            raise ValueError("train.weights and train.moments must be float32 where gossip.algorithm is synchronous")
        return self

    @model_validator(mode="after")
    def batches_are_bounded(self) -> "Config":
        sizes = {"micro_batch": self.train.micro_batch, "eval_sequences": self.train.eval_sequences}
        for key, sequences in sizes.items():
            if isinstance(sequences, int) and sequences * self.model.context > MAX_BATCH_TOKENS:
                raise ValueError(f"train.{key} times model.context must be at most {MAX_BATCH_TOKENS} tokens")
        return self

    @model_validator(mode="after")
    def tokens_fit_their_file(self) -> "Config":
        """Refuse a vocabulary too large for `data.token_bytes`: a wide token would be read as two narrow ones."""
        width, vocabulary = self.data.token_bytes, self.model.vocabulary
        if self.data.kind == "tokens" and vocabulary > 1 << 8 * width:
            most = f"data.token_bytes {width} allows a vocabulary of {1 << 8 * width}; model.vocabulary is {vocabulary}"
            raise ValueError(f"{most}: write 4 bytes a token and set data.token_bytes=4")
        return self

    @property
    def reads_bytes(self) -> bool:
        """Whether a token is a byte."""
        return self.data.facts.is_bytes

    @property
    def tokenizer(self) -> str | None:
        """The file or folder of the tokenizer that this peer's data are read with."""
        return self.data.tokenizer or self.model.start_from

    @property
    def own_inputs(self) -> OwnInputs:
        """The code and the files that this config names."""
        data = self.data
        column = data.column if data.column != DataConfig().column else None
        return OwnInputs(
            model_code=self.model.layers,
            model_folder=self.model.start_from,
            data=data.path,
            data_glob=data.glob,
            data_column=column,
            data_part=data.part,
            tokenizer=data.tokenizer,
        )

    def with_own(self, own: OwnInputs) -> "Config":
        """The same run with what this peer's own user names."""
        model = {"layers": own.model_code, "start_from": own.model_folder}
        data = {"path": own.data, "glob": own.data_glob, "column": own.data_column, "part": own.data_part}
        data["tokenizer"] = own.tokenizer
        sections = {"model": (self.model, model), "data": (self.data, data)}
        update = {
            name: section.model_copy(update={key: value for key, value in named.items() if value is not None})
            for name, (section, named) in sections.items()
        }
        return self.model_copy(update=update)

    def canonical(self) -> str:
        """JSON with every key that the peers of a run share, sorted: runs that are equal give equal text.

        The keys that name files of one peer are left out, and so are `LATER_KEYS` at their defaults; `RETIRED_KEYS` are
        added. So a run keeps its digest, by which its checkpoints are known, when keys come and go.
        """
        tree = self.model_dump(mode="json", by_alias=True)
        for section, retired in RETIRED_KEYS.items():
            tree[section] |= retired
        for section, key in LATER_KEYS:
            field = type(getattr(self, section)).model_fields[key]
            if getattr(getattr(self, section), key) == field.get_default(call_default_factory=True):
                del tree[section][key]
        for section, keys in OWN_KEYS.items():
            for key in keys:
                del tree[section][key]
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def digest(self) -> str:
        return hashlib.blake2b(self.canonical().encode(), digest_size=16).hexdigest()


FILES_OF_ROWS = (".jsonl", ".json", ".parquet", ".arrow")  # that only data.kind huggingface reads


def load(path: str | Path | None, overrides: Sequence[str] = (), own: OwnInputs = NOTHING_NAMED) -> Config:
    """The config at `path` (default: the one that comes with the package), then `key=value` overrides, then flags.

    `path` may also be the name of a shipped config, such as `default`. Raises UserError.
    """
    tree = own_yaml.mapping(_read(path), str(path or "default"))
    for override in overrides:
        _set(tree, override)
    _take_model(tree, own.model_folder)
    found = validated(tree)
    if own.model_code is not None and found.model.layers is not None:
        agreed_code(found.model.layers, own.model_code, "the config's")
    found = found.with_own(own)
    kind = found.data.facts
    if not kind.needs_path and own.of_data():
        rows = own.model_folder or own.tokenizer or str(own.data).endswith(FILES_OF_ROWS)
        other = "huggingface" if rows else "text"
        raise UserError(f"{own.of_data()}: data.kind {kind.name} reads no file; add --set data.kind={other}")
    if kind.needs_path and found.data.path is None:
        raise UserError(f"config: data.kind {kind.name} needs data.path, or the flag --data PATH")
    if kind.needs_tokenizer and found.tokenizer is None:
        raise UserError(f"config: data.kind {kind.name} needs data.tokenizer, or the flag --tokenizer PATH")
    if found.model.start_from is not None and kind.is_bytes and found.model.vocabulary != BYTES:
        other = f"data.kind {kind.name} gives bytes, and the model of model.from reads other tokens"
        raise UserError(f"config: {other}: take data.kind huggingface, or tokens")
    return found


def _take_model(tree: dict[str, object], folder: str | None) -> None:
    """Fills in the keys of `model` that the folder's config.json has: the flag's, or else that of model.from."""
    model = tree.setdefault("model", {})
    folder = folder or (model.get("from") if isinstance(model, dict) else None)
    if not isinstance(model, dict) or not isinstance(folder, str):
        return  # an error that `validated` names, or no folder
    found = families.model_keys(Path(folder))
    for key, value in found.items():
        if key in model and model[key] != value:
            source = Path(folder) / families.CONFIG_FILE
            raise UserError(f"config: model.{key} is {model[key]}, and {source} says {value}; leave the key out")
    model.setdefault("context", min(found["positions"], families.MOST_START_CONTEXT))
    tree["model"] = {**model, **found, "from": folder}


def _read(path: str | Path | None) -> str:
    shipped = files("decentral.configs") / f"{path or 'default'}.yaml"
    if path is None or (not Path(path).exists() and "/" not in str(path) and shipped.is_file()):
        return shipped.read_text()
    try:
        if Path(path).stat().st_size > MAX_YAML_BYTES:
            raise UserError(f"config: {path} is larger than {MAX_YAML_BYTES} bytes; is it a config?")
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        names = sorted(entry.name.removesuffix(".yaml") for entry in shipped_configs())
        shipped_ones = f"shipped ones: {', '.join(names)}{did_you_mean(str(path), names)}"
        raise UserError(f"config: cannot read {path} ({error}); {shipped_ones}") from None


def shipped_configs() -> list[Traversable]:
    return [entry for entry in files("decentral.configs").iterdir() if entry.name.endswith(".yaml")]


def _set(tree: dict[str, object], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set expects key=value, such as gossip.window_s=2; got {override!r}")
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {key}: {parent} is not a section")
        tree = child
    try:
        tree[leaf] = own_yaml.value(value)
    except ValueError:
        raise UserError(f"--set {key}: {value!r} is not a YAML value") from None


def validated(tree: Mapping[str, object]) -> Config:
    """The config in a tree of plain values. Raises UserError, in one line of printable text."""
    try:
        return Config.model_validate(_without_retired(tree))
    except ValidationError as error:
        raise UserError("config: " + printable(_explain(error), 300)) from None  # another peer may have sent it


def _without_retired(tree: Mapping[str, object]) -> dict[str, object]:
    """Return the tree without `RETIRED_KEYS`. Raises UserError if one of them has another value than it always has."""
    left = dict(tree)
    for section, retired in RETIRED_KEYS.items():
        if isinstance(given := left.get(section), Mapping):
            for key, only in retired.items():
                if (found := given.get(key, only)) != only or isinstance(found, bool):
                    here = printable(_SHORT.repr(found), 100)
                    said = f"config: {section}.{key} is {only} in every run; it is {here} here"
                    raise UserError(f"{said}; leave it out, or use the release that the run began with")
            left[section] = {key: value for key, value in given.items() if key not in retired}
    return left


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part not in _BRANCHES)
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{did_you_mean(key, _keys(Config))}"
    expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    expected = expected.replace("a valid integer", "an integer").replace("a valid ", "a ")
    if first["type"] == "value_error":
        return f"{key}: {expected}" if key and not expected.startswith(f"{key}.") else expected
    return f"{key} must be {expected}; it is {_SHORT.repr(first['input'])}"


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _keys(field.annotation, f"{prefix}{name}.")
    return keys
