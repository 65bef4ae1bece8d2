"""What only a peer's own user may name: the code of a model, files that data are read from, the destination of uploads.

The user who starts a swarm names these inputs in the config or by flags; a user who joins a swarm names them by flags.
A name that another peer sends is never used as an input (decentral/core/received.py).
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields

from decentral.core.errors import UserError
from decentral.core.plain_text import plain_text


@dataclass(frozen=True, slots=True)
class OwnInputs:
    """The code, files and place that this peer's user named, by flags, config or state folder. None: not named."""

    model_code: str | None = None  # package.module:function, which is imported and called
    model_folder: str | None = None  # a Hugging Face folder with the weights that the model starts from
    data: str | None = None
    data_glob: str | None = None
    data_column: str | None = None
    data_part: str | None = None  # k/n: which of n parts of the rows is read
    tokenizer: str | None = None
    upload: str | None = None  # the folder or address to which checkpoints are uploaded, or NO_UPLOAD

    @classmethod
    def of(cls, value_of: Callable[[str], str | None]) -> "OwnInputs":
        """Return inputs in which each field has the value that `value_of` returns for the field's name."""
        return cls(*(value_of(one.name) for one in fields(cls)))

    @classmethod
    def named_by(cls, flags: Namespace) -> "OwnInputs":
        """Return the inputs that parsed command-line flags name."""
        return cls.of(lambda name: getattr(flags, FLAGS[name][2:].replace("-", "_")))

    def or_else(self, kept: "OwnInputs") -> "OwnInputs":
        """Return a copy in which inputs from `kept`, the peer's state folder, replace the inputs that are None."""
        return OwnInputs.of(lambda name: getattr(self, name) or getattr(kept, name))

    def flags(self) -> list[str]:
        """Return these inputs as command-line flags of decentral.peer, each flag followed by its value."""
        named = ((flag, getattr(self, name)) for name, flag in FLAGS.items())
        return [part for flag, given in named if given is not None for part in (flag, given)]

    def of_data(self) -> str:
        """Return the flag of the first named input that concerns data, such as `--data`; "" if there is none."""
        return next((FLAGS[name] for name in OF_DATA if getattr(self, name) is not None), "")


FLAGS = {
    "model_code": "--trust-model-code",
    "model_folder": "--model-from",
    "data": "--data",
    "data_glob": "--data-glob",
    "data_column": "--data-column",
    "data_part": "--data-part",
    "tokenizer": "--tokenizer",
    "upload": "--upload",
}
MEANINGS = {  # by field, in the order of the help: the flag's metavar and help text; {places}: forms of a destination
    "data": ("PATH", "this peer's own text or tokens, if the run needs them"),
    "data_glob": ("PATTERN", "the files of a folder to read; for text **/*.txt"),
    "data_column": ("NAME", "the column with the text in rows of data; default text"),
    "data_part": ("K/N", "read only the K-th of N parts of streamed data"),
    "tokenizer": ("PATH", "this peer's own file or folder of the run's tokenizer"),
    "model_folder": ("DIR", "Hugging Face folder, or place of an upload, whose weights the run starts from"),
    "model_code": (
        "NAME",
        "package.module:function that builds the run's model, and is imported and called on this machine",
    ),
    "upload": ("PLACE", "copy checkpoints to {places}; off: no longer"),
}
PATHS = ("data", "model_folder", "tokenizer")  # files and folders, which the state folder keeps as absolute paths
OF_DATA = ("data", "data_glob", "data_column", "data_part", "tokenizer")
NOTHING_NAMED = OwnInputs()
NO_UPLOAD = "off"  # value of --upload that ends the uploads which an earlier start of the peer set up


def agreed_code(run: str | None, trusted: str | None, whose: str) -> str | None:
    """Check that the user trusts the code that builds the run's model, and return it; None: the built-in model.

    Args:
        run: `package.module:function` that the run's config names; None: the built-in model.
        trusted: The code that the user has named with --trust-model-code, if any.
        whose: The config's owner in error messages: "this swarm's" or "the config's".

    Raises:
        UserError: If `run` and `trusted` differ.
    """
    if run == trusted:
        return run
    if run is None:
        raise UserError(f"--trust-model-code {trusted}: {whose} model is built in, not code; leave the flag out")
    name = plain_text(run, 256)
    flag = f"--trust-model-code {name}"
    if trusted is None:
        raise UserError(f"{whose} model is code: {name} would run here; read it, and if you trust it, give {flag}")
    raise UserError(f"--trust-model-code {trusted}: {whose} model is {name}; if you trust that code, give {flag}")
