"""Helpers of all pictures: matplotlib figures, colours, and texts for speeds, times and names."""

import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from decentral.core.errors import UserError, writing
from decentral.core.plain_text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, DIM, PALE = "#1c2430", "#667085", "#d5dae1"
RED = "#c0342c"
USED = "#4a7fb5"
NAME_CHARS = 18
CHART_WIDTH_IN = 8.6
CHART_STYLE = {  # the fixed `hashsalt` gives equal SVG ids for equal data
    "svg.hashsalt": "decentral",
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
MATPLOTLIB = "matplotlib: pip install 'decentral[plot]'"


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def picture(file: str | Path, width_in: float, height_in: float) -> Iterator["Figure"]:
    """Yield a matplotlib figure, and write it to the file when the block ends; the file's suffix names the format.

    Raises:
        UserError: If matplotlib is not installed, the suffix is unknown, or the file cannot be written.
    """
    if not can_draw():
        raise UserError(f"--plot needs {MATPLOTLIB}")
    with _figure(width_in, height_in) as figure:
        yield figure
        _save(figure, file)


def svg_text(draw: Callable[["Axes"], None], height_in: float = 2.8) -> str:
    """Return a chart as the text of an <svg> element. The element loads no external file, and its texts are escaped.

    Args:
        draw: Function that plots on the axes of the chart.
        height_in: Height in inches; the width is CHART_WIDTH_IN.

    Raises:
        ImportError: If matplotlib is not installed. Call `can_draw` first to find out.
    """
    with _figure(CHART_WIDTH_IN, height_in, CHART_STYLE) as figure:
        axes = figure.add_subplot()
        axes.grid(axis="y", color="#e6e9ee", linewidth=0.7)
        axes.set_axisbelow(True)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", bbox_inches="tight", metadata=NO_METADATA)
    return text.getvalue().partition("<svg")[2].join(("<svg", ""))


@contextmanager
def _figure(width_in: float, height_in: float, more: Mapping[str, Any] = MappingProxyType({})) -> Iterator["Figure"]:
    """Yield a figure in the common style and the settings in `more`; close the figure when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "text.parse_math": False,
        "text.color": INK,
        "axes.labelcolor": DIM,
        "axes.edgecolor": PALE,
    }
    style |= {"xtick.color": DIM, "ytick.color": DIM, "axes.spines.top": False, "axes.spines.right": False}
    style |= {"svg.fonttype": "none", **more}  # text stays text, instead of becoming outlines
    with matplotlib.rc_context(style):
        figure = pyplot.figure(figsize=(width_in, height_in))
        try:
            yield figure
        finally:
            pyplot.close(figure)


def _save(figure: "Figure", file: str | Path) -> None:
    try:
        with writing("--plot", file):
            figure.savefig(file, dpi=100, facecolor="white")
    except ValueError as error:
        raise UserError(f"--plot {file}: {error}") from None


def colours(count: int) -> list[tuple[float, float, float]]:
    """Return `count` light RGB colours for dark text; neighbours in the list differ clearly in hue (golden angle)."""
    from colorsys import hls_to_rgb

    return [hls_to_rgb((0.58 + 0.381966 * number) % 1.0, 0.82 - 0.07 * (number % 2), 0.6) for number in range(count)]


def short_name(peer: str, region: str) -> str:
    """Return the last six characters of a libp2p id. From any other name, remove the region's name at the beginning."""
    own = peer.removeprefix(f"{region}-") or peer
    return printable(own[-6:] if own.startswith(("Qm", "12D3")) else own, NAME_CHARS)


def full_name(peer: str) -> str:
    """Return the last six characters of a libp2p id, or the first NAME_CHARS characters of any other name."""
    return printable(peer[-6:] if peer.startswith(("Qm", "12D3")) else peer, NAME_CHARS)


def speed_text(bytes_per_s: float) -> str:
    """Return a rate, given in bytes/s, as text in bits per second, such as `694 Mb/s`."""
    bits = bytes_per_s * 8
    for unit, name in ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s")):
        if bits >= unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits:.0f} b/s"


def link_text(bytes_per_s: float, delay_s: float) -> str:
    """Return the rate and the delay of a link as text, such as `694 Mb/s, 12 ms`."""
    return f"{speed_text(bytes_per_s)}, {delay_s * 1e3:.3g} ms"


def seconds_text(seconds: float) -> str:
    """Return a time as text: in seconds, or in milliseconds if it is less than 0.1 s."""
    return f"{seconds:.3g} s" if seconds >= 0.1 or seconds == 0 else f"{seconds * 1e3:.3g} ms"


def heading(figure: "Figure", text: str, below: str) -> float:
    """Write a title, and the smaller text `below` under the title.

    Returns:
        The y coordinate at which the free space under both texts begins, as a fraction of the figure's height.
    """
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(printable(text, 300), int((width - 0.4) / 0.105))
    figure.text(0.2 / width, 1 - 0.15 / height, "\n".join(lines), fontsize=12.5, va="top")
    used = 0.25 + 0.24 * len(lines)
    figure.text(0.2 / width, 1 - used / height, printable(below, 300), fontsize=8.5, color=DIM, va="top")
    return float(1 - (used + 0.55) / height)


def counted(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, separated by commas; append `+N` if N further names are left out."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} +{len(names) - most}"
