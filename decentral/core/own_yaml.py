"""Read YAML from a file or the command line as plain values. Peers never send each other YAML.

Anchors, aliases and merge keys are refused: with them a few hundred bytes can stand for gigabytes, and neither a config
nor a topology needs them. A key that is in a section twice is refused, too: YAML would drop its first value.
"""

import re
from typing import Any

import yaml

from decentral.core.errors import UserError
from decentral.core.plain_text import printable

INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
KEY_CHARS = 60  # an error shows at most so many characters of a key
LONGEST_NUMBER = 400  # longer numbers are refused: any finite float fits, and Python prints no int of over 4,300 digits


class _KeyTwice(yaml.MarkedYAMLError):
    """Raised for a key that is in a mapping twice; `problem` names it, with the line of the first one."""


class _PlainLoader(yaml.SafeLoader):
    """A safe YAML loader that refuses anchors, aliases, merge keys, and a key that is in a mapping twice.

    Unlike YAML 1.1, it reads 8e-3 as a number, and 1:30:00 as a text, not as a number to base 60.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:  # events of anchors and of aliases have this attribute
            raise yaml.MarkedYAMLError(problem="an anchor or an alias", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem="a merge key", problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                twice = f"the key {printable(key.value, KEY_CHARS)} twice, first at line {lines[key.value]}, again"
                raise _KeyTwice(problem=twice, problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = key.start_mark.line + 1


_PlainLoader.add_implicit_resolver(
    FLOAT,
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)$"),
    list("-+0123456789"),
)


def _number(loader: _PlainLoader, node: yaml.ScalarNode) -> object:
    """Return the number that a scalar stands for; the text itself if it has a colon, is too long, or is no number."""
    text: str = node.value
    if ":" in text or len(text) > LONGEST_NUMBER:
        return text
    read = loader.construct_yaml_int if node.tag == INT else loader.construct_yaml_float
    try:
        return read(node)
    except ValueError:  # a text such as `0x_`, which is not a number
        return text


_PlainLoader.add_constructor(INT, _number)
_PlainLoader.add_constructor(FLOAT, _number)


def tree(text: str, source: str) -> object:
    """Return the value in a YAML text; None if the text is empty.

    Args:
        text: The YAML text.
        source: The text's kind and origin, for error messages, such as `config: small.yaml`.

    Raises:
        UserError: If the text is not valid YAML, or holds an anchor, alias, merge key, or a key twice.
    """
    try:
        return yaml.load(text, Loader=_PlainLoader)  # a SafeLoader, which makes only plain values
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # a date with month 13 raises ValueError
        where, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" at line {where.line + 1}" if where else ""
        if isinstance(error, _KeyTwice):
            raise UserError(f"{source} has {problem}{line}; keep one of them") from None
        if problem in ("an anchor or an alias", "a merge key"):
            raise UserError(f"{source} has {problem}{line}; write the values out") from None
        raise UserError(f"{source} is not valid YAML{line}") from None


def mapping(text: str, source: str) -> dict[str, object]:
    """Return the mapping in the YAML text of a config; an empty mapping if the text is empty.

    Args:
        text: The YAML text.
        source: The text's origin, for error messages.

    Raises:
        UserError: If the text is not valid YAML, holds an anchor, alias, merge key or a key twice, or is not a mapping.
    """
    found = tree(text, f"config: {source}")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UserError(f"config: {source} must be a mapping of sections; it is a {type(found).__name__}")
    return found


def value(text: str) -> object:
    """Return the value in a YAML text.

    Raises:
        ValueError: If the text is not valid YAML, or holds an anchor, alias, merge key, or a key twice.
    """
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def override(tree: dict[str, object], text: str) -> None:
    """Set a key of a config's tree by a text such as `gossip.window_s=2`, whose value is YAML.

    Raises:
        UserError: If the text is not KEY=VALUE, the value is not YAML, or a part of KEY before the last is no section.
    """
    key, equals, given = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set expects key=value, such as gossip.window_s=2; got {text!r}")
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {key}: {parent} is a value, not a section; expected section.key=value")
        tree = child
    try:
        tree[leaf] = value(given)
    except ValueError:
        raise UserError(f"--set {key}: {given!r} is not a YAML value") from None
