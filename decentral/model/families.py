"""Families of decoders that differ from Llama by a few options, and the fields of their Hugging Face config.json.

`decoder` computes all families; `FAMILIES` lists the options that each has. `model_keys` turns a config.json into keys
of the section `model`, and `config_json` does the reverse. If a field asks for a computation that `decoder` lacks, an
error names the field; fields that transformers ignores for a family are ignored here too.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decentral.core import foreign_file, strict_json
from decentral.core.errors import UserError
from decentral.core.plain_text import SHOWN_CHARS, printable
from decentral.core.strict_json import JsonFields, JsonObject

if TYPE_CHECKING:
    from decentral.model.shape import ModelConfig, RopeScaling

CONFIG_FILE = "config.json"
MAX_CONFIG_JSON_BYTES = 1 << 20
MOST_START_CONTEXT = 2048  # for a pretrained model, the default of `model.context` is its context, but at most this


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders: its class in transformers, its options, and the defaults of its config.json."""

    architecture: str
    block: tuple[str, ...] = ()  # the family's config.json may set these fields of `BlockOptions`
    query_bias: bool = False  # the projections to queries, keys and values always have biases
    query_norm: str = ""  # RMSNorm of queries and keys: "heads" over each head's channels, "all" over all channels
    norm_after: bool = False  # attention and feed-forward normalise their outputs instead of their inputs
    window: bool = False  # `sliding_window` in config.json limits the attention of every block
    fused: bool = False  # files fuse the matrices of queries, keys and values, and those of the feed-forward's inputs
    silent: JsonFields = field(default_factory=dict)  # defaults of fields that this family's config.json may omit


BIASES = ("attention_bias", "mlp_bias")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", BIASES),
    "mistral": Family("MistralForCausalLM", window=True, silent={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", query_bias=True, silent={"num_key_value_heads": 32}),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        ("attention_bias",),
        query_norm="heads",
        silent={"num_key_value_heads": 32, "head_dim": 128},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", ("attention_bias",), query_norm="all", norm_after=True, silent={"rms_norm_eps": 1e-5}
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        (*BIASES, "unrotated"),
        silent={
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
    ),
    "granite": Family(
        "GraniteForCausalLM",
        (*BIASES, *MULTIPLIERS),
        silent=dict.fromkeys(MULTIPLIERS, 1.0),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        ("partial_rotary_factor",),
        window=True,
        fused=True,
        silent={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
}
THEIR_NAMES = {  # field of config.json -> key of the section `model`; only the fields in OPTIONAL may be missing
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "intermediate_size": "hidden",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "max_position_embeddings": "positions",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_channels",
}
OPTIONAL = ("num_key_value_heads", "head_dim")
ONLY = {  # field of config.json -> its accepted values; a field that is in `Family.block` may have any value
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
    "auto_map": (),  # refused, since it names code in the folder; Phi-3 may have it: transformers has Phi-3's code
}
ROPE_NAMES = {  # kind of rotary scaling -> field of config.json -> field of `RopeScaling`
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "positions",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "positions",
        "beta_slow": "low",
        "beta_fast": "high",
        "attention_factor": "attention",
        "truncate": "truncate",
    },
    "longrope": {
        "factor": "factor",
        "original_max_position_embeddings": "positions",
        "attention_factor": "attention",
        "short_factor": "short",
        "long_factor": "long",
    },
}
# These rotary settings are accepted with every kind of scaling.
IDLE = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}
MSCALES = ("mscale", "mscale_all_dim")  # without `attention_factor`, yarn computes it from both of these fields


def model_keys(folder: Path) -> JsonObject:
    """Return the keys of the section `model` for a folder's config.json.

    Raises:
        UserError: If config.json cannot be read, or a field asks for a computation that `decoder` lacks; the error
            names the field.
    """
    found = read(folder)
    try:
        return _keys(folder, found)
    except (TypeError, ValueError, ArithmeticError, LookupError):
        wrong = "has a value of a type that transformers does not write"
        raise UserError(f"{folder / CONFIG_FILE} {wrong}; give a folder that transformers saved") from None


def _keys(folder: Path, found: JsonFields) -> JsonObject:
    name = found.get("model_type")
    if name not in FAMILIES:
        raise _refusal(folder, "model_type", name, f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[str(name)]
    passed = {*family.block, "auto_map"} if family.fused else {*family.block}
    for theirs, allowed in ONLY.items():
        value = found.get(theirs)
        if theirs not in passed and value is not None and value not in allowed:
            raise _refusal(folder, theirs, value, repr(allowed[0]) if allowed else "no such field")
    fields = {**family.silent, **found}
    for theirs in THEIR_NAMES:
        if theirs not in OPTIONAL and fields.get(theirs) is None:
            raise UserError(f"{folder / CONFIG_FILE} lacks {theirs}; give a folder that transformers saved")
        if not isinstance(fields.get(theirs, 0), int | None):
            raise _refusal(folder, theirs, fields[theirs], "a whole number")
    keys = {ours: fields[theirs] for theirs, ours in THEIR_NAMES.items() if fields.get(theirs) is not None}
    rope = _rope(folder, family, fields)
    keys |= {"family": name, "norm_eps": float(fields.get("rms_norm_eps", 1e-6)), "rope_theta": rope.pop("theta")}
    if rope:
        keys["rope_scaling"] = rope
    if block := _block(family, fields):
        keys["block"] = block
    if window := _window(folder, family, fields):
        keys["window"] = window
    return keys


def _block(family: Family, fields: JsonFields) -> JsonObject:
    """Return the section `model.block` that follows from a config.json's fields."""
    found = {name: fields[name] for name in family.block if fields.get(name) is not None}
    if "unrotated" in family.block:
        kept, every = fields.get("no_rope_layers"), fields["no_rope_layer_interval"]
        if kept is None:
            kept = [(block + 1) % every for block in range(fields["num_hidden_layers"])]
        found["unrotated"] = tuple(block for block in range(fields["num_hidden_layers"]) if not kept[block])
    if "partial_rotary_factor" in family.block and "partial_rotary_factor" in _rope_given(fields):
        found["partial_rotary_factor"] = _rope_given(fields)["partial_rotary_factor"]
    return {name: float(value) if type(value) is int else value for name, value in found.items()}


def is_tied(folder: Path) -> bool:
    """Return whether the head shares the embedding's weights. Raises UserError if config.json cannot be read."""
    found = read(folder)
    silent: JsonFields = FAMILIES[str(found["model_type"])].silent if found.get("model_type") in FAMILIES else {}
    return bool({**silent, **found}.get("tie_word_embeddings", False))


def _rope_given(fields: JsonFields) -> Any:
    """Return config.json's rotary settings, which transformers 4 and 5 name differently; {} if there are none."""
    return fields.get("rope_scaling") or fields.get("rope_parameters") or {}


def _rope(folder: Path, family: Family, fields: JsonFields) -> JsonObject:
    """Return `theta` and, if rotary positions are scaled, the keys of `model.rope_scaling`.

    Raises:
        UserError: If a field asks for a kind of scaling that `rotary` lacks.
    """
    given = _rope_given(fields)
    if not isinstance(given, dict):
        raise _refusal(folder, "rope_scaling", given, "a mapping")
    theta = given.get("rope_theta", fields.get("rope_theta"))
    found: JsonObject = {"theta": float(10_000.0 if theta is None else theta)}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default" and (kind not in ROPE_NAMES or (family.fused and kind != "longrope")):
        raise _refusal(folder, "rope_type", kind, f"default, {'longrope' if family.fused else ', '.join(ROPE_NAMES)}")
    names = ROPE_NAMES.get(kind, {})
    known = {*names, *IDLE, *(MSCALES if kind == "yarn" else ())}
    for theirs, value in given.items():
        if theirs not in known and value is not None and value not in ONLY.get(theirs, ()):
            raise _refusal(folder, f"rope_scaling.{theirs}", value, "no such field")
    if not family.fused and given.get("partial_rotary_factor", 1) != 1:
        raise _refusal(folder, "rope_scaling.partial_rotary_factor", given["partial_rotary_factor"], "1")
    if kind == "default":
        return found
    found["kind"] = kind
    # Like transformers, read this field first from config.json's top level, then from the rotary settings. If both
    # lack it, use max_position_embeddings.
    inside, most = given.get("original_max_position_embeddings"), fields["max_position_embeddings"]
    first = fields.get("original_max_position_embeddings") or inside or most
    values = {**given, "original_max_position_embeddings": first}
    if values.get("factor") is None and kind in ("yarn", "longrope"):
        values["factor"] = max(1.0, most / first)
    if kind == "yarn" and values.get("attention_factor") is None and all(map(values.get, MSCALES)):
        above, below = (0.1 * float(values[name]) * math.log(values["factor"]) + 1 for name in MSCALES)
        values["attention_factor"] = above / below
    for theirs, ours in names.items():
        value = values.get(theirs)
        if ours in ("short", "long"):
            found[ours] = tuple(map(float, value or ()))
        elif value or (value is not None and ours not in ("low", "high")):  # ignored by transformers: 0 for low, high
            found[ours] = value if ours in ("positions", "truncate") else float(value)
    return found


def _window(folder: Path, family: Family, fields: JsonFields) -> int | None:
    kinds = set(fields.get("layer_types") or ())
    allowed = {"full_attention", "sliding_attention"} if family.window else {"full_attention"}
    if not kinds <= allowed or len(kinds) > 1:
        raise _refusal(folder, "layer_types", sorted(map(str, kinds)), "full_attention for all layers")
    window: int | None = fields.get("sliding_window")
    return window if family.window else None


def read(folder: Path) -> JsonObject:
    """Return the fields of a folder's config.json.

    Raises:
        UserError: If the file cannot be read, is larger than MAX_CONFIG_JSON_BYTES, or is not a JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        found = strict_json.loads(foreign_file.read_text(path, MAX_CONFIG_JSON_BYTES))
    except OSError as error:
        raise UserError(
            f"model.from: cannot read {path} ({error.strerror}); give a Hugging Face model's folder"
        ) from None
    except ValueError:
        raise UserError(f"{path} is not valid JSON; give a folder that transformers saved") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must be a JSON object; it is a {type(found).__name__}")
    return found


def _refusal(folder: Path, name: str, value: object, expected: str) -> UserError:
    said = printable(str(value), SHOWN_CHARS)
    return UserError(f"{folder / CONFIG_FILE}: {name} is {said}, which is not supported; expected {expected}")


def config_json(model: "ModelConfig", tied: bool) -> JsonObject:
    """Return the model's config.json for transformers 4 and 5. `tied`: the head has the embedding's weights."""
    family = FAMILIES[model.family]
    rope = {"rope_type": "default"} if model.rope_scaling is None else _rope_fields(model, model.rope_scaling)
    beside = ("original_max_position_embeddings",) if family.fused else ()
    found: JsonObject = {
        "architectures": [family.architecture],
        "model_type": model.family,
        "vocab_size": model.vocabulary,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_hidden,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.d_head,
        "max_position_embeddings": model.positions or model.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # for transformers 4; version 5 reads rope_parameters
        "rope_scaling": None
        if model.rope_scaling is None
        else {name: rope[name] for name in rope if name not in beside},
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }
    if family.window:
        found["sliding_window"] = model.window
    if family.fused and model.rope_scaling is not None:
        found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return found | _block_fields(model)


def _block_fields(model: "ModelConfig") -> JsonObject:
    found = {name: getattr(model.block, name) for name in FAMILIES[model.family].block}
    if "unrotated" in found:
        unrotated = found.pop("unrotated")
        found |= {
            "no_rope_layers": [int(block not in unrotated) for block in range(model.depth)],
            "layer_types": ["full_attention"] * model.depth,
            "use_sliding_window": False,
        }
    if found.get("attention_multiplier", 0) is None:
        found["attention_multiplier"] = model.d_head**-0.5
    return found


def _rope_fields(model: "ModelConfig", scaling: "RopeScaling") -> JsonObject:
    names = ROPE_NAMES[scaling.kind]
    values = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = first = scaling.positions or model.positions or model.context
    if scaling.kind == "longrope" and scaling.factor == max(1.0, (model.positions or model.context) / first):
        del values["factor"]  # transformers 4 refuses a factor for Phi-3
    kept = {theirs: value for theirs, value in values.items() if value not in (None, ())}
    return {"type" if scaling.kind == "longrope" else "rope_type": scaling.kind, **kept}
