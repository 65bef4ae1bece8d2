"""What all peers of a run must have alike though each has its own files: the weights it starts from, its tokenizer.

The founder's digests go into the run's config; the others compare their own files with them.
"""

from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.train import conversations, start_weights, token_file, tokenizer

NEW_TOKENS = "make them with the run's: python -m decentral.tokenize TEXT --tokenizer PATH --out FILE"


def sealed(run: Config) -> Config:
    """A new run with the digests of this peer's files. Raises UserError if they cannot be read."""
    update: dict[str, object] = {}
    if run.model.start_from is not None:
        update["model"] = run.model.model_copy(update={"weights": start_weights.digest(run.model)})
    if not run.reads_bytes:
        update["data"] = run.data.model_copy(update={"tokenizer_digest": _tokenizer_digest(run)})
    return run.model_copy(update=update)


def check(run: Config, begun: bool) -> None:
    """Raises UserError where this peer's files are not the run's. `begun`: it has a checkpoint, and the folder of the
    first weights may be gone."""
    if run.model.start_from is not None and not begun:
        start_weights.compare(run.model)
    known = run.data.tokenizer_digest
    if known is None:
        return
    try:
        own = _tokenizer_digest(run)
    except conversations.NoTemplate:
        lacks = "it has no chat template, and this run's tokenizer has one"
        raise UserError(f"--tokenizer {run.tokenizer}: {lacks}; name a copy of the run's") from None
    if own == known:
        return
    if own is None:
        unknown = f"{run.data.path} has no description ({run.data.path}.json) of the tokenizer that made it"
        raise UserError(f"data: {unknown}, and this run compares tokenizers; name it with --tokenizer PATH")
    if not run.data.facts.needs_tokenizer:
        raise UserError(f"data: {run.data.path} was made by another tokenizer than this run's; {NEW_TOKENS}")
    also = ", or its chat template," if run.data.format == "chat" else ","
    raise UserError(
        f"--tokenizer {run.tokenizer}: this run's tokenizer, or the token between its texts{also} is another"
    )


def _tokenizer_digest(run: Config) -> str | None:
    """Return the tokenizer's digest, for chats with the template's; None if a token file's tokenizer is unknown."""
    if not run.data.facts.needs_tokenizer:
        return token_file.digest(run)
    assert run.tokenizer is not None
    return conversations.digest(run.data, run.tokenizer, tokenizer.load(run.tokenizer).digest)
