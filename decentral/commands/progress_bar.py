"""The progress bar of a long command, shown only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(console: Console, total: float | None, quiet: bool = False) -> Iterator[Callable[[float, str], None]]:
    """Yield a function (done, text) that updates a progress bar; without a terminal, or if `quiet`, it does nothing.

    Args:
        console: Where the bar is shown.
        total: The value of `done` when the work is complete; None: not known. Then the bar shows elapsed time only.
        quiet: Whether to show nothing.
    """
    if quiet or not console.is_terminal:
        yield lambda done, text: None
        return
    time_column = TimeElapsedColumn() if total is None else TimeRemainingColumn()
    with Progress(BarColumn(), TextColumn("{task.description}"), time_column, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)
