"""YAML of this user's own file or command line, as plain values. What peers send each other is never YAML.

Anchors, aliases and merge keys are refused: with them some hundred bytes stand for gigabytes, and a config has no use
for them.
"""

import re
from typing import Any

import yaml

from decentral.core.errors import UserError


class _PlainLoader(yaml.SafeLoader):
    """YAML as people write it: 8e-3 is a number too (YAML 1.1 wants 8.0e-3)."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:  # an alias is an event with an anchor too
            raise yaml.MarkedYAMLError(problem="an anchor or an alias", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem="a merge key", problem_mark=key.start_mark)


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)$"),
    list("-+0123456789"),
)


def mapping(text: str, source: str) -> dict[str, object]:
    """The mapping in a text; empty for an empty text. Raises UserError, which names `source`, for anything else."""
    try:
        tree = yaml.load(text, Loader=_PlainLoader)  # _PlainLoader is a SafeLoader: it makes plain values only
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date or a number that cannot be
        where, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" at line {where.line + 1}" if where else ""
        if problem in ("an anchor or an alias", "a merge key"):
            raise UserError(f"config: {source} has {problem}{line}; write the values out") from None
        raise UserError(f"config: {source} is not valid YAML{line}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"config: {source} must be a mapping of sections; it is a {type(tree).__name__}")
    return tree


def value(text: str) -> object:
    """The value that a text stands for. Raises ValueError if it stands for none."""
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None
