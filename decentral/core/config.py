"""The config of a run: its sections and keys, how a YAML file is loaded, and the form in which peers send it.

`load` reads the file of the peer that starts a run; other peers receive the canonical form (core/received.py).
An unknown key is refused; the error names the nearest valid key. Flags, not keys, set how one peer runs (device, state
folder, throttle).

Another peer may have sent a config, so every number and text is bounded, to limit memory and compute. If a size is the
product of several numbers, a validator bounds the product.
"""

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema

from decentral.core import foreign_file, own_yaml
from decentral.core.choices import ALGORITHMS, DATA_KINDS, FILES_OF_ROWS, OPTIMIZERS, WIRES, DataKind, names_with
from decentral.core.config_keys import keys_of
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
from decentral.core.quantities import comma_hint
from decentral.model import families
from decentral.model.shape import ModelConfig as ModelConfig

MAX_YAML_BYTES = 64 * 1024
MAX_CONFIG_BYTES = 8 * 1024  # a larger config from another peer is refused; the longest valid config has about 2 KiB
BESIDE_TOKENS = 0.5  # gossip of a peer with a part of the model may use at most this share of its uplink
BYTES = 256  # size of the vocabulary if each token is a byte
MAX_BATCH_TOKENS = 1 << 24  # a micro-batch has at most this many tokens; as int64 they take 128 MiB
EVALUATED_TOKENS = 8192  # held-out tokens in an evaluation, of 8 to 64 sequences
# Section -> key that names a peer's own file or upload destination -> field of OwnInputs; never sent to other peers.
OWN_KEYS = {
    "model": {"from": "model_folder"},
    "data": {
        "path": "data",
        "glob": "data_glob",
        "column": "data_column",
        "part": "data_part",
        "tokenizer": "tokenizer",
    },
    "train": {"upload": "upload"},
}
# Paths of keys that old releases lack, such as ("model", "block", "query_norm"); `canonical` omits their defaults.
LATER_KEYS: tuple[tuple[str, ...], ...] = (("model", "block"), ("model", "bottleneck"))
# Section -> keys of earlier releases. A config may still contain such a key, but only with the value given here.
RETIRED_KEYS: dict[str, dict[str, float | str]] = {
    "data": {"token_bytes": 2},  # a file shows its width
    "train": {
        **{"final_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "logits_at_once": 1 << 25},
        "eval_sequences": 64,
        "dtype": "auto",  # the device's own: bfloat16 if it has units for that
    },
    "gossip": {"momentum": 0.0, "step": 1.0, "consensus": 1.0, "consensus_every": 3, "max_age_s": 60.0},
    "routes": {"sums": 4, "holders": 2},
    "swarm": {"max_peers": 4096, "record_ttl_s": 60.0, "renew_s": 20.0, "refresh_s": 4.0, "shards": 1},
}
MAX_ROUND = 256  # a synchronous round has at most this many micro-batches, because each report names all micro-batches
SEALED_SUMS = 4  # with `routes.overlap`, at most this many complete sums of gradients wait for their optimizer steps
# For a key with several types, pydantic adds one of these type names to the key's path; error texts omit the type name.
_BRANCHES = {"int", "float", "constrained-int", "constrained-float", "literal['auto']"}
_SHORT = reprlib.Repr()  # shows a refused value in an error text, cut to six entries or thirty characters
_SHORT.maxlevel = 2


if TYPE_CHECKING:
    AlgorithmName = str
    DataKindName = str
    OptimizerName = str
    WireName = str
else:  # at run time, pydantic accepts only the names in the tables of core/choices.py
    AlgorithmName, DataKindName, OptimizerName = Literal[*ALGORITHMS], Literal[*DATA_KINDS], Literal[*OPTIMIZERS]
    WireName = Literal["auto", *WIRES]


class DataConfig(Strict):
    """The data that peers train on. Each peer sets `path`, `glob`, `column`, `part` and `tokenizer` for itself."""

    kind: DataKindName = "python-stdlib"
    """What peers read. python-stdlib: the sources of Python's standard library. text: text files. Both give one token
    for each byte. tokens: a file of tokens. huggingface: rows of text, which a tokenizer turns into tokens."""
    path: OwnPath | None = None
    """File or folder that this peer reads; or, with kind huggingface, the name of a data set on Hugging Face."""
    glob: Annotated[str, Field(max_length=256)] | None = None
    """Pattern of the files to read in folder `path`; null: `**/*.txt` for kind text, training files for huggingface."""
    format: Literal["text", "chat", "completion"] = "text"
    """With kind huggingface, what a row is. text: one text. chat: messages, of which only the assistant's are learned.
    completion: a prompt and a completion, of which only the completion is learned."""
    column: Annotated[str, Field(max_length=256)] = "text"
    """With kind huggingface: name of the column that has the text or the messages."""
    part: Annotated[str, Field(pattern=r"^[1-9]\d{0,3}/[1-9]\d{0,3}$", max_length=9)] | None = None
    """k/n: this peer reads the k-th of n parts of the rows, so that n peers with 1/n to n/n share
    out the rows; null: this peer reads all rows."""
    tokenizer: OwnPath | None = None
    """File or folder of the run's tokenizer on this machine; null: with kind huggingface, the tokenizer in the folder
    `model.from`; with kind tokens, the tokenizer that the description of the file of tokens names."""
    tokenizer_digest: SkipJsonSchema[Digest | None] = None  # of all peers' tokenizer; `sealed` sets it
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the tokens that are kept for the held-out loss; no peer trains on these tokens. Unit: share of 1."""

    @property
    def facts(self) -> DataKind:
        """The record of `kind` in `DATA_KINDS`: the keys that the kind needs, and whether its tokens are bytes."""
        return DATA_KINDS[self.kind]

    def given_path(self) -> str:
        """Return `path`; raise UserError if this peer's user has named none."""
        if self.path is None:
            raise UserError(f"config: data.kind {self.kind} needs data.path, or the flag --data PATH")
        return self.path

    @model_validator(mode="after")
    def format_is_read(self) -> "DataConfig":
        """Refuse a `format` other than text unless `kind` has formats."""
        if self.format != "text" and not self.facts.has_formats:
            formatted = names_with(DATA_KINDS, lambda one: one.has_formats)
            raise ValueError(f"data.format {self.format} needs data.kind {formatted}; data.kind is {self.kind}")
        return self

    @model_validator(mode="after")
    def part_is_one(self) -> "DataConfig":
        """Refuse `part` k/n (the k-th of n parts) if k is above n."""
        if self.part and int(self.part.split("/")[0]) > int(self.part.split("/")[1]):
            raise ValueError(f"data.part expects k/n with k from 1 to n; it is {self.part}")
        return self


class TrainConfig(Strict):
    """How each peer trains. `weights`, `moments` and `recompute` can save memory, at the cost of accuracy or time."""

    weights: Literal["float32", "bfloat16"] = "float32"
    """Number type in which weights and gradients are stored; bfloat16 is rounded stochastically."""
    moments: Literal["float32", "int8"] = "float32"
    """Number type in which AdamW stores matrices' moments; int8 needs bitsandbytes: pip install '.[8bit]'."""
    recompute: bool = False
    """Compute a block's activations again in the backward pass instead of keeping them."""
    micro_batch: Positive | Literal["auto"] = 8
    """Sequences in one micro-batch; auto: the fastest number that fits the memory. Unit: sequences."""
    accumulate: Positive = 1
    """Number of micro-batches in one optimizer step of a peer or, if gossip.algorithm is synchronous, in one optimizer
    step of the whole swarm. Unit: micro-batches."""
    optimizer: OptimizerName = "muon"
    """Optimizer of the matrices between the model's first and last layer: adamw, or muon (Newton-Schulz iterations).
    AdamW trains all other weights."""
    learning_rate: PositiveFloat | Literal["auto"] = "auto"
    """Learning rate between warm-up and decay; auto: the best rate measured for the optimizer, 0.008 for muon and 0.004
    for adamw. Unit: multiple of the optimizer's update."""
    warmup_steps: Steps = 50
    """Steps at the beginning of the run in which the learning rate rises linearly. Unit: steps."""
    total_steps: Large | None = None
    """Step until which the learning rate falls linearly to a tenth; null: the rate stays constant. Unit: steps."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.1
    """Decoupled weight decay: a step shrinks the weights by this value times the learning rate. Unit: factor."""
    clip_norm: PositiveFloat = 1.0
    """Largest norm of a gradient: of the whole model, or of a fragment in routed training. Unit: L2 norm."""
    compile: bool = False
    """Compile the layers with torch.compile, on types of devices that support it."""
    eval_every_s: Interval = 15.0
    """Time between two evaluations of the held-out loss. Unit: seconds."""
    emulated_micro_batch_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Make each micro-batch take at least this long, to emulate a slower device. Unit: seconds."""
    upload: OwnPath | None = None
    """Folder or address, such as s3://BUCKET/PATH, to which this peer uploads copies of its checkpoints; null: it
    uploads none."""

    @property
    def peak_rate(self) -> float:
        """The learning rate between warm-up and decay; the best measured rate if `learning_rate` is auto."""
        return OPTIMIZERS[self.optimizer].peak_rate if self.learning_rate == "auto" else self.learning_rate


class GossipConfig(Strict):
    """How peers average weights or gradients. If `algorithm` is synchronous, only `fragment_parameters` is used."""

    algorithm: AlgorithmName = "pull"
    """Peers pull each other's pseudo-gradients and never wait (pull), average weights and wait (allreduce), or average
    gradients before each step (synchronous)."""
    window_s: Interval = 0.5
    """Time between two exchanges; peers lengthen it to stay within `link_share` and `core_share`. Unit: seconds."""
    start_window_s: Interval = 0.125
    """Time between two exchanges in the first `start_steps` steps, in which weights drift apart fastest.
    Unit: seconds."""
    start_steps: Steps = 100
    """Number of the swarm's first steps in which `start_window_s` replaces `window_s`. Unit: steps."""
    code: Literal["auto", "q4", "q1", "sparse"] = "auto"
    """How algorithm pull encodes pseudo-gradients. q4: 4 bits a number. q1: only the signs. sparse: the largest 16th.
    auto: q1 if this peer's link is so slow that q4 would lengthen windows, else q4."""
    partners: Annotated[int, Field(gt=0, le=64)] = 3
    """Number of peers that a peer pulls from in each window. Unit: peers."""
    link_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the uplink's rate that gossip may use. Unit: share of 1."""
    core_share: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Gossip may use at most this share of the training cores' time, and twice this share in the first
    `start_steps` steps. Unit: share of 1."""
    fragment_parameters: Large = 65_536
    """Minimum size of a fragment, the part of the model that is exchanged at once: consecutive layers are joined until
    they have this many parameters. Unit: parameters."""

    @property
    def share_beside_tokens(self) -> float:
        """Return the share of an uplink that gossip may use on a peer with a part of the model, which sends tokens."""
        return min(self.link_share, BESIDE_TOKENS)


class RoutesConfig(Strict):
    """How activations and gradients travel between peers, if each peer holds only a part of the layers."""

    wire: WireName = "bf16"
    """Codec of the activations sent to the next peer, and of the gradients sent back: fp32, bf16, int8, or int8-q4 (8
    bits an activation, 4 bits a gradient). auto: int8-q4 if this peer's uplink is slow, else bf16."""
    overlap: bool = False
    """Begin new micro-batches before the optimizer step of the previous micro-batches. Training is then faster over
    slow links, but gradients are stale."""

    @property
    def slots(self) -> int:
        """How many gradient sums may wait for their optimizer steps at the same time; 1 without `overlap`."""
        return SEALED_SUMS if self.overlap else 1


class SwarmConfig(Strict):
    """How often a peer saves checkpoints."""

    checkpoint_every_s: Interval = 30.0
    """Time between two checkpoints; longer if saving would take over 1% of the time or 32 MB/s. Unit: seconds."""


class Config(Strict):
    """The config of a run. All peers of a swarm have equal configs, except for keys that name a peer's own files."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$", max_length=41)] = "stdlib-gpt"
    """Name of the run, the first part of its id."""
    seed: Annotated[int, Field(ge=-(1 << 62), lt=1 << 62)] = 0
    """Seed of the initial weights, and of the order of the data. Unit: none."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    gossip: GossipConfig = GossipConfig()
    routes: RoutesConfig = RoutesConfig()
    swarm: SwarmConfig = SwarmConfig()

    @property
    def synchronous(self) -> bool:
        """Whether all peers take each step together, with the sum of their gradients (comm/rounds)."""
        return ALGORITHMS[self.gossip.algorithm].synchronous

    @model_validator(mode="after")
    def rounds_are_possible(self) -> "Config":
        """Refuse settings that synchronous rounds do not support."""
        if self.train.accumulate > MAX_ROUND and self.synchronous:
            most = f"{MAX_ROUND} where gossip.algorithm is synchronous; it is {self.train.accumulate}"
            raise ValueError(f"train.accumulate must be at most {most}")
        if self.routes.overlap and self.synchronous:
            raise ValueError("routes.overlap must be false where gossip.algorithm is synchronous")
        if self.synchronous and (self.train.weights, self.train.moments) != ("float32", "float32"):
            raise ValueError("train.weights and train.moments must be float32 where gossip.algorithm is synchronous")
        return self

    @model_validator(mode="after")
    def batches_are_bounded(self) -> "Config":
        """Refuse micro-batches of more than `MAX_BATCH_TOKENS`."""
        sequences = self.train.micro_batch
        if isinstance(sequences, int) and sequences * self.model.context > MAX_BATCH_TOKENS:
            most = f"{MAX_BATCH_TOKENS} tokens; it is {sequences * self.model.context}"
            raise ValueError(f"train.micro_batch times model.context must be at most {most}")
        return self

    @property
    def eval_sequences(self) -> int:
        """The number of held-out sequences in one evaluation."""
        return max(8, min(64, EVALUATED_TOKENS // self.model.context))

    @property
    def reads_bytes(self) -> bool:
        """Whether a token is a byte."""
        return self.data.facts.is_bytes

    @property
    def tokenizer(self) -> str | None:
        """The file or folder of this peer's tokenizer: `data.tokenizer`, else `model.from`."""
        return self.data.tokenizer or self.model.start_from

    @property
    def own_inputs(self) -> OwnInputs:
        """The model code, files and folders that this config names; `data_column` is None for the default column."""
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
            upload=self.train.upload,
        )

    def with_own(self, own: OwnInputs) -> "Config":
        """Return a copy of the config with the values of `own`; a value of None leaves the config's value unchanged."""
        model = {"layers": own.model_code, "start_from": own.model_folder}
        data = {"path": own.data, "glob": own.data_glob, "column": own.data_column, "part": own.data_part}
        data["tokenizer"] = own.tokenizer
        sections = {"model": (self.model, model), "data": (self.data, data)}
        sections["train"] = (self.train, {"upload": own.upload})
        update = {
            name: section.model_copy(update={key: value for key, value in named.items() if value is not None})
            for name, (section, named) in sections.items()
        }
        return self.model_copy(update=update)

    def canonical(self) -> str:
        """Return the keys that all peers share as sorted JSON, so that equal runs have equal text.

        The text omits `OWN_KEYS`, and `LATER_KEYS` that have their defaults; it includes `RETIRED_KEYS`. Therefore the
        run's digest, which checkpoints store, stays the same when a release adds or drops keys.
        """
        tree = self.model_dump(mode="json", by_alias=True)
        if self.model.lora is not None:
            tree["model"]["lora"]["alpha"] = self.model.lora.alpha
        for section, retired in RETIRED_KEYS.items():
            tree[section] |= retired
        for *path, key in LATER_KEYS:
            holder: Strict = self
            part = tree
            for name in path:
                holder, part = getattr(holder, name), part.get(name) or {}
            if key in part and part[key] == type(holder)().model_dump(mode="json")[key]:
                del part[key]
        for section, keys in OWN_KEYS.items():
            for key in keys:
                del tree[section][key]
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def digest(self) -> str:
        """Return the blake2b of the canonical form: 32 hexadecimal digits."""
        return hashlib.blake2b(self.canonical().encode(), digest_size=16).hexdigest()


def load(path: str | Path | None, overrides: Sequence[str] = (), own: OwnInputs = NOTHING_NAMED) -> Config:
    """Return the config of a file, changed by overrides and then by flags.

    Args:
        path: A YAML file, or the name of a config that comes with the package; None: `default`.
        overrides: `key=value` texts, such as `gossip.window_s=2`; if a key occurs twice, the last text applies.
        own: The code, files and folders that the user named by flags.

    Raises:
        UserError: If the file cannot be read, a key or value is refused, a flag contradicts the config, or `data` lacks
            a path or tokenizer that its kind needs.
    """
    tree = tree_of(path, overrides)
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
    if kind.needs_path:
        found.data.given_path()
    if kind.needs_tokenizer and found.tokenizer is None:
        raise UserError(f"config: data.kind {kind.name} needs data.tokenizer, or the flag --tokenizer PATH")
    if found.model.start_from is not None and kind.is_bytes and found.model.vocabulary != BYTES:
        other = "but the model in model.from reads other tokens"
        fitting = names_with(DATA_KINDS, lambda one: not one.is_bytes)
        raise UserError(f"config: data.kind {kind.name} gives bytes, {other}; set data.kind to {fitting}")
    return found


def tree_of(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, object]:
    """Return the values that a config file and overrides set, unchecked; arguments and errors are those of `load`."""
    tree = own_yaml.mapping(_read(path), str(path or "default"))
    for override in overrides:
        own_yaml.override(tree, override)
    return tree


def _take_model(tree: dict[str, object], folder: str | None) -> None:
    """Copy the model's shape from the config.json in `folder`, or in the folder `model.from`, to `tree`.

    Raises UserError if the tree has a different value for a copied key.
    """
    model = tree.setdefault("model", {})
    folder = folder or (model.get("from") if isinstance(model, dict) else None)
    if not isinstance(model, dict) or not isinstance(folder, str):
        return  # nothing to copy: no folder is named, or `model` is malformed, which `validated` reports
    found = families.model_keys(Path(folder))
    for key, value in found.items():
        if key in model and model[key] != value:
            source = Path(folder) / families.CONFIG_FILE
            raise UserError(f"config: model.{key} is {model[key]}, but {source} has {value}; leave the key out")
    model.setdefault("context", min(found["positions"], families.MOST_START_CONTEXT))
    tree["model"] = {**model, **found, "from": folder}


def _read(path: str | Path | None) -> str:
    shipped = files("decentral.configs") / f"{path or 'default'}.yaml"
    if path is None or (not Path(path).is_file() and "/" not in str(path) and shipped.is_file()):
        return shipped.read_text()
    try:
        return foreign_file.read_text(path, MAX_YAML_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        names = sorted(entry.name.removesuffix(".yaml") for entry in shipped_configs())
        shipped_ones = f"give a YAML file or a shipped config: {', '.join(names)}{did_you_mean(str(path), names)}"
        raise UserError(f"config: cannot read {path} ({getattr(error, 'strerror', error)}); {shipped_ones}") from None


def shipped_configs() -> list[Traversable]:
    """Return the YAML files that come with the package."""
    return [entry for entry in files("decentral.configs").iterdir() if entry.name.endswith(".yaml")]


def validated(tree: Mapping[str, object]) -> Config:
    """Return the config in a tree of plain values; raise UserError, one printable line, if the config is not valid."""
    try:
        return Config.model_validate(_without_retired(tree))
    except ValidationError as error:
        # `printable`, because the text may quote a value from another peer
        raise UserError("config: " + printable(_explain(error), 300)) from None


def _without_retired(tree: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of the tree without `RETIRED_KEYS`; raise UserError if such a key has a value that is refused."""
    left = dict(tree)
    for section, retired in RETIRED_KEYS.items():
        if isinstance(given := left.get(section), Mapping):
            for key, only in retired.items():
                if (found := given.get(key, only)) != only or isinstance(found, bool):
                    here = printable(_SHORT.repr(found), 100)
                    remedy = "leave it out, or use the release that the run began with"
                    raise UserError(f"config: {section}.{key} must be {only} in this release, but is {here}; {remedy}")
            left[section] = {key: value for key, value in given.items() if key not in retired}
    return left


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part not in _BRANCHES)
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{did_you_mean(key, [known.path for known in keys_of(Config)])}"
    expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    expected = expected.replace("a valid integer", "an integer").replace("a valid ", "a ")
    if key == "name" and first["type"] in ("string_pattern_mismatch", "string_too_long"):
        expected = "1 to 41 of the characters a-z, 0-9 and -, of which the first is not -"
    if first["type"] == "value_error":
        return f"{key}: {expected}" if key and not expected.startswith(f"{key}.") else expected
    near = did_you_mean(str(first["input"])[:30], expected.split("'")[1::2])  # the allowed names are quoted
    if not near and ("number" in expected or "integer" in expected):
        near = comma_hint(str(first["input"])[:30], whole="integer" in expected)
    number = any(word in expected for word in ("number", "integer", "greater", "less"))
    allowed = next((f" ({one.allowed})" for one in keys_of(Config) if number and one.path == key), "")
    return f"{key} must be {expected}{allowed}; it is {_SHORT.repr(first['input'])}{near}"
