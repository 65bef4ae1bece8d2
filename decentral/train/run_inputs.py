"""What all peers of a run must have alike though each has its own files: the weights it starts from, its tokenizer.

The founder's digests go into the run's config; the others compare their own files with them.
"""

from decentral.core.config import Config
from decentral.train import start_weights


def sealed(run: Config) -> Config:
    """A new run with the digests of this peer's files. Raises UserError if they cannot be read."""
    if run.model.start_from is None:
        return run
    return run.model_copy(update={"model": run.model.model_copy(update={"weights": start_weights.digest(run.model)})})


def check(run: Config, begun: bool) -> None:
    """Raises UserError where this peer's files are not the run's. `begun`: it has a checkpoint, and the folder of the
    first weights may be gone."""
    if run.model.start_from is not None and not begun:
        start_weights.compare(run.model)
