"""Check that a peer's initial weights and tokenizer are the same as those of the first peer of the run.

The first peer of a run puts the digests of its files into the run's config (`sealed`); the other peers compare their
files with these digests (`check`).
"""

from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.data import conversations, token_file, tokenizer
from decentral.model import start_weights

NEW_TOKENS = "make it with the run's tokenizer: python -m decentral.tokenize TEXT --tokenizer PATH --out FILE"


def sealed(run: Config) -> Config:
    """Return a new run's config with the digests of this peer's files. Raises UserError if a file cannot be read."""
    update: dict[str, object] = {}
    if run.model.start_from is not None:
        update["model"] = run.model.model_copy(update={"weights": start_weights.digest(run.model)})
    if not run.reads_bytes:
        update["data"] = run.data.model_copy(update={"tokenizer_digest": _tokenizer_digest(run)})
    return run.model_copy(update=update)


def check(run: Config, begun: bool) -> None:
    """Raise UserError if this peer's initial weights or tokenizer differ from the run's, or cannot be read.

    Args:
        run: The run's config, with the digests of the first peer's files.
        begun: Whether this peer has a checkpoint. If so, the folder of initial weights is not read and may be missing.
    """
    if run.model.start_from is not None and not begun:
        start_weights.compare(run.model)
    known = run.data.tokenizer_digest
    if known is None:
        return
    try:
        own = _tokenizer_digest(run)
    except conversations.NoTemplate:
        lacks = "the tokenizer has no chat template, and this run's tokenizer has one"
        raise UserError(f"--tokenizer {run.tokenizer}: {lacks}; name a copy of the run's tokenizer") from None
    if own == known:
        return
    if own is None:
        unknown = f"{run.data.path} has no description ({run.data.path}.json) of the tokenizer that made it"
        raise UserError(f"data: {unknown}, so it cannot be checked; name that tokenizer with --tokenizer PATH")
    if not run.data.facts.needs_tokenizer:
        raise UserError(f"data: {run.data.path} was made by another tokenizer than this run's; {NEW_TOKENS}")
    also = ", or its chat template," if run.data.format == "chat" else ","
    differs = f"the tokenizer, or its token between texts{also} differs from this run's"
    raise UserError(f"--tokenizer {run.tokenizer}: {differs}; name a copy of the run's tokenizer")


def _tokenizer_digest(run: Config) -> str | None:
    """Return the digest of the tokenizer and, for chats, its template; None if a token file's tokenizer is unknown."""
    if not run.data.facts.needs_tokenizer:
        return token_file.digest(run)
    assert run.tokenizer is not None
    return conversations.digest(run.data, run.tokenizer, tokenizer.load(run.tokenizer).digest)
