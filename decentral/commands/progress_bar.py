"""The progress bar of a command that takes long, where its output is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(console: Console, total: float | None, quiet: bool = False) -> Iterator[Callable[[float, str], None]]:
    """Yield a function that shows how much of `total` is done, with a text; nothing is shown where `quiet`.

    Without `total` nobody knows how much there is to do, and the time that has passed stands in the place of the rest.
    """
    if quiet or not console.is_terminal:
        yield lambda done, text: None
        return
    time_column = TimeElapsedColumn() if total is None else TimeRemainingColumn()
    with Progress(BarColumn(), TextColumn("{task.description}"), time_column, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)
