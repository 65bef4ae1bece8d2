"""A run's report as a picture: tokens/s, spread of the replicas, and live peers over virtual time."""

from pathlib import Path

from decentral.core.errors import UserError
from decentral.sim.report import RunReport

SMOOTHED = 10  # samples over which a rate is taken


def draw(report: RunReport, path: Path) -> None:
    """Writes a PNG. Raises UserError without matplotlib, or where the file cannot be written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'decentral[plot]'") from None
    at = [one.at for one in report.samples]
    made, times = [0, *(one.tokens for one in report.samples)], [0.0, *at]
    ago = [max(0, number - SMOOTHED) for number in range(1, len(made))]
    rates = [(made[n + 1] - made[m]) / (times[n + 1] - times[m]) for n, m in enumerate(ago)]
    figure, (top, middle, bottom) = pyplot.subplots(3, sharex=True, figsize=(9, 7))
    top.plot(at, rates)
    middle.semilogy(at, [max(one.spread, 1e-6) for one in report.samples])
    bottom.plot(at, [one.live for one in report.samples], label="live")
    bottom.plot(at, [one.training for one in report.samples], label="training")
    for axes, label in ((top, "tokens/s"), (middle, "spread of the replicas"), (bottom, "peers")):
        axes.set_ylabel(label)
    bottom.set_xlabel("virtual seconds")
    bottom.legend()
    figure.suptitle(f"{report.peers} peers, seed {report.seed}")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--plot {path}: {error.strerror}; choose a place that can be written") from None
    finally:
        pyplot.close(figure)
