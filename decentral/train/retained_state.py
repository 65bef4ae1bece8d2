"""States of fragments that this peer has given up, kept beside its checkpoint: a layer whose last holder is lost can be
recovered from here.

Each fragment has a file, written like a checkpoint: the state as a newcomer would get it, with its sections, and the
learning-rate step at which it was given up.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from decentral.core.jobs import Donated, Layout, RetainedStates, Section
from decentral.train.checkpoint import write_atomically
from decentral.train.span_change import RetainedState

_NAME = "kept-{}.safetensors"


@dataclass(frozen=True, slots=True)
class RetainedStateStore:
    """The retained states in a folder, of the one run whose config has this digest."""

    folder: Path
    run: str

    def write(self, state: Donated, step: int) -> None:
        """Replaces the retained state of this fragment. Raises OSError and leaves the old one."""
        fragment, layout, blob = state
        facts = {"run": self.run, "step": step, "layout": [asdict(section) for section in layout]}
        data = save({"state": np.frombuffer(blob, dtype=np.uint8)}, {"facts": json.dumps(facts)})
        write_atomically(self._path(fragment), data)

    def read(self, fragment: int) -> RetainedState | None:
        """The retained state of this fragment, or None if none of this run can be read."""
        if (found := self._facts(fragment)) is None:
            return None
        with safe_open(self._path(fragment), framework="np") as file:
            return *found, file.get_tensor("state").tobytes()

    def forget(self, fragments: Iterable[int]) -> None:
        """Deletes the states of fragments that this peer holds again."""
        for fragment in fragments:
            self._path(fragment).unlink(missing_ok=True)

    def steps(self, fragments: Iterable[int]) -> RetainedStates:
        """Which of these fragments have a retained state, each with its learning-rate step."""
        found = ((fragment, self._facts(fragment)) for fragment in fragments)
        return tuple((fragment, facts[0]) for fragment, facts in found if facts is not None)

    def _facts(self, fragment: int) -> tuple[int, Layout] | None:
        try:
            with safe_open(self._path(fragment), framework="np") as file:
                facts = json.loads(file.metadata()["facts"])
            layout = tuple(Section(**section) for section in facts["layout"])
            return (int(facts["step"]), layout) if facts["run"] == self.run else None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            return None

    def _path(self, fragment: int) -> Path:
        return self.folder / _NAME.format(fragment)
