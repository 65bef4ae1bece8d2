"""What only the user of a peer may name: the code of a model, and the files that data are read from.

Whoever starts a swarm says so in the config or by flags; whoever joins one, by flags. Nothing that comes from the
network ever gets here (decentral/core/swarm_config.py).
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields

from decentral.core.errors import UserError
from decentral.core.plain_text import plain_text


@dataclass(frozen=True, slots=True)
class OwnInputs:
    """The values of this peer's flags, or those of its own config or state folder. None: nothing is named."""

    model_code: str | None = None  # package.module:function, which is imported and called
    model_folder: str | None = None  # a Hugging Face folder, whose weights the model starts from
    data: str | None = None  # the file or folder that is read
    data_glob: str | None = None  # which files of a folder
    data_column: str | None = None  # which column of their rows
    data_part: str | None = None  # k/n: which of n parts of them
    tokenizer: str | None = None  # its file or folder

    @classmethod
    def of(cls, value_of: Callable[[str], str | None]) -> "OwnInputs":
        """Return what this gives for the name of each input."""
        return cls(*(value_of(one.name) for one in fields(cls)))

    @classmethod
    def named_by(cls, flags: Namespace) -> "OwnInputs":
        """Return the code and the files that the user of this peer has named by flags."""
        return cls.of(lambda name: getattr(flags, FLAGS[name][2:].replace("-", "_")))

    def or_else(self, kept: "OwnInputs") -> "OwnInputs":
        """These, and where they name nothing, those that were kept."""
        return OwnInputs.of(lambda name: getattr(self, name) or getattr(kept, name))

    def flags(self) -> list[str]:
        """The flags of decentral.peer that name the same."""
        named = ((flag, getattr(self, name)) for name, flag in FLAGS.items())
        return [part for flag, given in named if given is not None for part in (flag, given)]

    def of_data(self) -> str:
        """The flag of the first of these that is about data; empty if none is."""
        return next((FLAGS[name] for name in OF_DATA if getattr(self, name) is not None), "")


FLAGS = {
    "model_code": "--trust-model-code",
    "model_folder": "--model-from",
    "data": "--data",
    "data_glob": "--data-glob",
    "data_column": "--data-column",
    "data_part": "--data-part",
    "tokenizer": "--tokenizer",
}
OF_DATA = ("data", "data_glob", "data_column", "data_part", "tokenizer")
NOTHING_NAMED = OwnInputs()


def agreed_code(run: str | None, trusted: str | None, whose: str) -> str | None:
    """The code that a run's model is built by; None: the built-in model. `whose`: the swarm's, or the config's.

    Raises UserError unless the user trusts just that code.
    """
    if run == trusted:
        return run
    if run is None:
        raise UserError(f"--trust-model-code {trusted}: {whose} model is the built-in one; leave the flag out")
    name = plain_text(run, 256)
    flag = f"--trust-model-code {name}"
    if trusted is None:
        raise UserError(f"{whose} model is code: {name} would run here; read it, and if you trust it, give {flag}")
    raise UserError(f"--trust-model-code {trusted}: {whose} model is {name}; if you trust that code, give {flag}")
