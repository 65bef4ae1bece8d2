"""What all pictures share: matplotlib where it is installed, colours, and how speeds and names are written."""

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

INK, DIM, PALE = "#1c2430", "#667085", "#d5dae1"  # of texts and lines
RED = "#c0342c"  # of what decides how long it takes
USED = "#4a7fb5"  # of links that carry something
NAME_CHARS = 18  # of a name in a picture
CHART_WIDTH_IN = 8.6  # of a chart in a page
CHART_STYLE = {  # the fixed `hashsalt` makes matplotlib write equal data as equal SVG text
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
def picture(file: str | Path, width_in: float, height_in: float, dpi: int = 100) -> Iterator["Figure"]:
    """A matplotlib figure, which is written to the file when the block ends. The suffix says in which format.

    Raises UserError without matplotlib, and where the file cannot be written.
    """
    if not can_draw():
        raise UserError(f"--plot needs {MATPLOTLIB}")
    with _figure(width_in, height_in) as figure:
        yield figure
        _save(figure, file, dpi)


def svg_text(draw: Callable[["Axes"], None], height_in: float = 2.8) -> str:
    """Return a chart as an <svg> element for a page, with what `draw` puts on its axes. It needs matplotlib.

    The element asks for no font, script or file, and texts in it are escaped.
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
    """A figure in the style of all pictures, and `more` of it, which is closed when the block ends."""
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
    style |= {"svg.fonttype": "none", **more}  # text stays text
    with matplotlib.rc_context(style):  # math is off, as a region's name may have dollar signs
        figure = pyplot.figure(figsize=(width_in, height_in))
        try:
            yield figure
        finally:
            pyplot.close(figure)


def _save(figure: "Figure", file: str | Path, dpi: int) -> None:
    try:
        with writing("--plot", file):
            figure.savefig(file, dpi=dpi, facecolor="white")
    except ValueError as error:  # matplotlib does not know the suffix
        raise UserError(f"--plot {file}: {error}") from None


def colours(count: int) -> list[tuple[float, float, float]]:
    """So many light colours, on which dark text can be read. Neighbours in the list are far apart (golden angle)."""
    from colorsys import hls_to_rgb

    return [hls_to_rgb((0.58 + 0.381966 * number) % 1.0, 0.82 - 0.07 * (number % 2), 0.6) for number in range(count)]


def short_name(peer: str, region: str) -> str:
    """What tells a peer from the others where its region's name stands beside it."""
    own = peer.removeprefix(f"{region}-") or peer
    return printable(own[-6:] if own.startswith(("Qm", "12D3")) else own, NAME_CHARS)


def full_name(peer: str) -> str:
    return printable(peer[-6:] if peer.startswith(("Qm", "12D3")) else peer, NAME_CHARS)


def speed_text(bytes_per_s: float) -> str:
    """`694 Mb/s`, as links are sold."""
    bits = bytes_per_s * 8
    for unit, name in ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s")):
        if bits >= unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits:.0f} b/s"


def link_text(bytes_per_s: float, delay_s: float) -> str:
    return f"{speed_text(bytes_per_s)}, {delay_s * 1e3:.3g} ms"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 or seconds == 0 else f"{seconds * 1e3:.3g} ms"


def heading(figure: "Figure", text: str, below: str) -> float:
    """Writes what the picture says, and smaller what it is of; gives the height that this leaves, as a part of all."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(printable(text, 300), int((width - 0.4) / 0.105))
    figure.text(0.2 / width, 1 - 0.15 / height, "\n".join(lines), fontsize=12.5, va="top")
    used = 0.25 + 0.24 * len(lines)
    figure.text(0.2 / width, 1 - used / height, printable(below, 300), fontsize=8.5, color=DIM, va="top")
    return float(1 - (used + 0.55) / height)


def counted(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} +{len(names) - most}"
