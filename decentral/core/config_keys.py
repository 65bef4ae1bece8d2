"""List the keys of a config with their meanings, units and ranges, for help texts and error messages.

`keys_of` reads the JSON schema that pydantic derives from the sections, so each range is the one that pydantic checks.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel

from decentral.core.strict_json import JsonFields

UNIT = " Unit: "  # in the docstring of a key whose value is a number, the unit follows this text
TYPE_WORDS = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "array": "list",
    "boolean": "true | false",
    "null": "null",
}
LIMIT_WORDS = {  # name of a limit in JSON schema -> the limit in words
    "exclusiveMinimum": "above {}",
    "minimum": "at least {}",
    "exclusiveMaximum": "below {}",
    "maximum": "at most {}",
    "maxLength": "at most {} characters",
    "pattern": "matching {}",
    "maxItems": "at most {} entries",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a config, or a section with keys of its own."""

    path: str
    meaning: str
    unit: str  # "" if the value is not a number
    allowed: str  # the allowed values in words; "" for a section that every config has
    default: str  # as YAML; "" for a key without a default, and for a section that every config has
    is_idle: bool  # whether the key is in a section that configs omit by default, so that the key has no effect


@cache
def keys_of(section: type[BaseModel]) -> tuple[Key, ...]:
    """Return the keys of a section in their order; a key that is a section is followed by the keys in that section."""
    schema = section.model_json_schema()
    return tuple(_keys(schema, schema.get("$defs", {}), "", False))


def _keys(section: JsonFields, sections: JsonFields, prefix: str, is_idle: bool) -> Iterator[Key]:
    for name, field in section["properties"].items():
        kinds = field.get("anyOf", [field])
        inner = next((sections[kind["$ref"].rpartition("/")[2]] for kind in kinds if "$ref" in kind), None)
        always = inner is not None and kinds == [field]
        described = " ".join((field.get("description") or (inner or {}).get("description", "")).split())
        meaning, _, unit = described.partition(UNIT)
        yield Key(
            path=prefix + name,
            meaning=meaning,
            unit=unit.removesuffix("."),
            allowed="" if always else " | ".join(map(_allowed, kinds)),
            default="" if always or "default" not in field else json.dumps(field["default"]),
            is_idle=is_idle,
        )
        if inner is not None:
            yield from _keys(inner, sections, f"{prefix}{name}.", is_idle or not always)


def _allowed(kind: JsonFields) -> str:
    """Return text that says which values a JSON schema allows, such as `integer, at least 2, below 4,096`."""
    if "$ref" in kind:
        return "a section with the keys below"
    if "const" in kind or "enum" in kind:
        return " | ".join(map(str, kind.get("enum", [kind.get("const")])))
    limits = [words.format(_readable(kind[limit])) for limit, words in LIMIT_WORDS.items() if limit in kind]
    each = [f"each {_allowed(kind['items'])}"] if "items" in kind else []
    return ", ".join([TYPE_WORDS[kind["type"]], *limits, *each])


def _readable(limit: float | str) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}" if isinstance(limit, float) else limit
