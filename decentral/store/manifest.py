"""The manifest of an upload: which run or model it is of, and which files it has, with their sizes and digests.

    NAME/manifest.json             written last: without it the upload does not exist
    NAME/checkpoint.safetensors-00000 ...   or config.json, model.safetensors, ...

Anybody may have written a manifest, so a reader checks it: sizes, counts and names are bounded, and a manifest may name
only kinds of file that are never executed or unpickled. NAME contains a digest of the content, so that no upload
replaces the files of another upload.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId, suffix
from decentral.core.units import MiB

MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 16 * MiB
MOST_UPLOAD_PARTS = 100_000  # parts have at most 5 MiB, so a checkpoint may have about half a terabyte
MOST_UPLOAD_BYTES = 1 << 46
RUN_FILE, STATE_FILE = "run.json", "checkpoint.safetensors"
MODEL_FILE = re.compile(r"[A-Za-z0-9][\w.-]*\.(safetensors|json|jinja|txt|md|model)")
FILE_NAME = r"^[A-Za-z0-9][\w.-]{0,199}$"  # a file name without a path separator, and without a dot at its beginning
RUN_NAME = r"^[A-Za-z0-9-]{0,80}$"  # the id of a run or a peer; "" if there is none
DIGEST_BYTES = 16
NAME_DIGITS = 10

UploadKind = Literal["checkpoint", "model"]
FileName = Annotated[str, StringConstraints(pattern=FILE_NAME)]
HexDigest = Annotated[str, StringConstraints(pattern=f"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$")]
RunName = Annotated[str, StringConstraints(pattern=RUN_NAME)]


@dataclass(frozen=True, slots=True)
class UploadPart:
    """A stored file, which is a whole file or a part of a file. A manifest lists the parts of a file in their order."""

    name: FileName
    of: FileName  # name of the whole file
    bytes: Annotated[int, Field(ge=0, lt=MOST_UPLOAD_BYTES)]
    digest: HexDigest  # blake2b of the content


@dataclass(frozen=True, slots=True)
class UploadManifest:
    """The kind of an upload, and its files. For a model, `run`, `peer`, `step`, `first` and `last` are "" or 0."""

    kind: UploadKind
    parts: Annotated[tuple[UploadPart, ...], Field(max_length=MOST_UPLOAD_PARTS)]
    run: RunName = ""
    peer: RunName = ""
    step: Annotated[int, Field(ge=0, lt=1 << 60)] = 0  # the swarm's learning-rate step
    first: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    last: Annotated[int, Field(ge=0, le=1 << 16)] = 0  # the checkpoint has the state of layers [first, last)
    format: Literal["decentral-upload-1"] = "decentral-upload-1"

    @property
    def size(self) -> int:
        """The bytes of all files together."""
        return sum(part.bytes for part in self.parts)

    @property
    def digest(self) -> str:
        """Digest of everything that the manifest says."""
        return hashlib.blake2b(self.packed(), digest_size=DIGEST_BYTES).hexdigest()

    @property
    def name(self) -> str:
        """Name of the upload's folder, which depends on the content and, for a checkpoint, sorts by step."""
        end = self.digest[:NAME_DIGITS]
        return f"{series(RunId(self.run), PeerId(self.peer))}{self.step:012d}-{end}" if self.run else f"model-{end}"

    def packed(self) -> bytes:
        """Return the manifest as JSON."""
        return strict_json.dumps(asdict(self), indent=1).encode()


_MANIFEST = TypeAdapter(UploadManifest)


def series(run: RunId, peer: PeerId) -> str:
    """Return the beginning of the names of all checkpoints that a peer uploads from a run."""
    return f"{run}-{suffix(peer) or 'copy'}-step-"


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint's upload; -1 if the name has none."""
    found = re.search(r"-step-([0-9]{12})-[0-9a-f]+$", name)
    return int(found[1]) if found else -1


def parsed(data: bytes, source: str) -> UploadManifest:
    """Return the manifest in a file that somebody else may have written.

    Args:
        data: The file's content.
        source: The file, for error messages.

    Raises:
        UserError: If it is no valid manifest, or names a file that this kind of upload does not have.
    """
    try:
        found = _MANIFEST.validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{source} is no manifest that this release reads ({key}: {first['msg']})") from None
    _check_names(found.parts, found.kind, source)
    return found


def _check_names(parts: Sequence[UploadPart], kind: UploadKind, source: str) -> None:
    names = [part.name for part in parts]
    if len(set(names)) < len(names) or MANIFEST in names:
        raise UserError(f"{source} names a file twice, or names itself")
    for part in parts:
        if not (part.of in (RUN_FILE, STATE_FILE) if kind == "checkpoint" else MODEL_FILE.fullmatch(part.of)):
            raise UserError(f"{source} names the file {part.of}, which a {kind} does not have; it is not read")
    wholes = [
        part.of for before, part in zip([None, *parts], parts, strict=False) if not before or before.of != part.of
    ]
    if len(set(wholes)) < len(wholes):
        raise UserError(f"{source} does not list the parts of a file one after another")
