"""Draw a comparison of solvers: the best plan that each solver has found, over the seconds of its search."""

from collections.abc import Mapping, Sequence

from decentral.view.canvas import DIM, picture


def draw_comparison(records: Mapping[str, Sequence[tuple[float, float]]], file: str, unit: str) -> None:
    """Draw a line for each solver into a file.

    Args:
        records: For each solver, points (seconds of search, best value so far). A plan that is not the result of a
            search has one point.
        file: Path of the picture.
        unit: Unit of the values: `s`, the communication of a step, or `tokens/s`.

    Raises:
        UserError: If matplotlib is not installed, or the file cannot be written.
    """
    with picture(file, 9, 5) as figure:
        axes = figure.add_axes((0.08, 0.12, 0.68, 0.78))
        end = max(record[-1][0] for record in records.values()) or 1.0
        names = []
        for name, record in records.items():
            seconds, costs = zip(*record, (end, record[-1][1]), strict=True)
            (line,) = axes.step(seconds, costs, where="post", linestyle="--" if len(record) == 1 else "-")
            names.append((record[-1][1], f"{name}  {record[-1][1]:.4g} {unit}", line.get_color()))
        low, high = axes.get_ylim()
        last = low - 1.0
        for cost, text, colour in sorted(names):
            last = max(cost, last + 0.045 * (high - low))
            axes.text(end * 1.01, last, text, color=colour, fontsize=9, va="center")
        axes.set(
            xlim=(0, end), xlabel="seconds of search", ylabel="communication of a step, s" if unit == "s" else unit
        )
        axes.set_title(
            "The best plan of each solver so far; dashed: layouts that a person would draw",
            fontsize=11,
            loc="left",
            color=DIM,
        )
