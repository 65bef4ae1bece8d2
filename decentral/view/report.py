"""Write the report of a run as one HTML page: charts, tables and events from the peers' journals.

Start reading at `page_of`. A browser can open the page from disk: the page has no script, and its content policy
forbids every request. If matplotlib is not installed, the page has no charts.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.plain_text import printable
from decentral.core.time_spent import KINDS
from decentral.core.units import plural, readable_bytes, readable_number
from decentral.view.canvas import MATPLOTLIB, can_draw
from decentral.view.charts import COLOURS, RunCharts, reasons_of, time_unit
from decentral.view.run_history import PeerHistory, RunHistory

MOST_SHOWN = 300
NO_CHARTS = f"no charts: they need {MATPLOTLIB}"

STYLE = """
body { background: #fff; color: #1c2430; font: 15px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .2rem; }
p { margin: .2rem 0 .6rem; color: #667085; }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-size: .82rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: #667085; }
th, td { padding: .2rem .6rem .2rem 0; vertical-align: top; border-bottom: 1px solid #e6e9ee; }
.number { text-align: right; white-space: nowrap; }
.wide { overflow-x: auto; }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 2rem; margin: .8rem 0; }
.facts b { display: block; font-size: 1.25rem; font-weight: 600; }
.facts span { color: #667085; font-size: .85rem; }
.key { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .35em; }
.legend span { margin-right: 1.1rem; white-space: nowrap; }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(run: RunHistory) -> str:
    """Return the report of a run as the text of one HTML page."""
    charts = RunCharts(run)
    name = ", ".join(dict.fromkeys(peer.facts.run for peer in run.peers if peer.facts.run)) or "a run"
    parts = [
        f"<h1>{shown(name)}</h1>",
        _facts(run),
        *([] if can_draw() else [f"<p>{NO_CHARTS}</p>"]),
        _chart(
            "Loss over time", "Training loss of each peer; dotted, with points: held-out loss.", charts.loss_over_time
        ),
        _chart("Loss over tokens", "The same losses, over the tokens of all peers together.", charts.loss_over_tokens),
        _chart("Throughput", "Tokens per second, stacked by peer.", charts.throughput),
        _chart(
            "Account of time", _legend(KINDS) + "The figure at the right is training's share.", charts.account_of_time
        ),
        _chart("Presence of peers", "Paler while a peer was joining; ✕ where its process was killed.", charts.presence),
        _chart("Exchanges", _legend(OUTCOMES) + "in each time interval.", charts.exchanges),
        _reasons(run),
        _chart("Bytes", "What all peers together sent and received.", charts.traffic),
        "<h2>Peers</h2>",
        _peers(charts),
        _events(run),
    ]
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    head += '<meta name="viewport" content="width=device-width">'
    return (
        f"<!doctype html><html lang=en><head>{head}<title>{shown(name)}</title><style>{STYLE}</style></head><body>"
        + ("\n".join(parts) + "</body></html>\n")
    )


def shown(text: str) -> str:
    """Shorten and escape a text for the page, because the text may come from an untrusted peer."""
    return escape(printable(text, 400))


def _chart(title: str, words: str, draw: Callable[[], str]) -> str:
    return f"<h2>{title}</h2><p>{words}</p>{draw()}" if can_draw() else ""


def _legend(names: Iterable[str]) -> str:
    keys = (f"<span>{_key(COLOURS[name])}{name}</span>" for name in names)
    return f'<span class="legend">{"".join(keys)}</span>'


def _key(colour: str) -> str:
    return f'<i class="key" style="background: {colour}"></i>'


def _facts(run: RunHistory) -> str:
    seconds = max(1e-3, run.last - run.began)
    unit, name = time_unit(seconds)
    held_out = [peer.held_out.value[-1] for peer in run.peers if peer.held_out.value]
    facts = {
        "peers": f"{len(run.peers)}",
        name: f"{seconds / unit:.3g}",
        "tokens": readable_number(run.tokens),
        "tokens/s": readable_number(run.tokens / seconds),
        "lowest last held-out loss": f"{min(held_out):.3f}" if held_out else "-",
    }
    shown_facts = "".join(
        f"<div><b>{shown(value)}</b><span>{shown(name)}</span></div>" for name, value in facts.items()
    )
    bad = sum(peer.bad for peer in run.peers)
    began = datetime.fromtimestamp(run.began, UTC).strftime("%Y-%m-%d %H:%M UTC")
    warning = f" {plural(bad, 'line')} of the journals could not be read." if bad else ""
    return f'<p>{began}, from the journals of its peers.{warning}</p><div class="facts">{shown_facts}</div>'


def _reasons(run: RunHistory) -> str:
    rows = [
        (outcome, reason or "-", f"{count:,}")
        for (outcome, reason), count in sorted(reasons_of(run).items(), key=lambda item: -item[1])
    ]
    return _table(("outcome", "reason", "exchanges"), rows[:40], numbers=(2,))


def _peers(charts: RunCharts) -> str:
    names = (
        "peer",
        "device",
        "throttle",
        "lives",
        "tokens",
        "tokens/s",
        "training",
        "done/solo/failed",
        "sent",
        "received",
    )
    rows = [_peer(peer) for peer in charts.run.peers]
    return _table((*names, "loss"), rows, range(2, 11), charts.colours())


def _peer(peer: PeerHistory) -> tuple[str, ...]:
    work = peer.totals.whole
    outcomes = work.exchanges.outcomes
    return (
        peer.name,
        peer.facts.device,
        f"{peer.facts.throttle:g}",
        f"{peer.totals.starts}",
        readable_number(work.tokens),
        readable_number(work.tokens / peer.lived_s) if peer.lived_s else "-",
        f"{work.spent.shares()['training']:.1%}",
        "/".join(f"{outcomes[outcome]}" for outcome in OUTCOMES),
        readable_bytes(work.sent_bytes),
        readable_bytes(work.received_bytes),
        f"{peer.losses.value[-1]:.3f}" if peer.losses.value else "-",
    )


def _events(run: RunHistory) -> str:
    found = sorted((t, peer.name, event, said) for peer in run.peers for t, event, said in peer.events)
    if not found:
        return ""
    rows = [(f"{t - run.began:.1f} s", name, event, said) for t, name, event, said in found[-MOST_SHOWN:]]
    earlier = f"<p>The last {MOST_SHOWN} of {len(found)} events.</p>" if len(found) > MOST_SHOWN else ""
    return f"<h2>Plans, moves and troubles</h2>{earlier}" + _table(("at", "peer", "event", ""), rows)


def _table(
    names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = (), colours: Sequence[str] = ()
) -> str:
    """Return a table as HTML.

    Args:
        names: The columns' titles.
        rows: The cells' texts, which are escaped here.
        numbers: Indexes of the columns that are aligned to the right.
        colours: Colour of the mark before each row. If empty, rows have no marks.
    """
    right = set(numbers)

    def cells(tag: str, row: Sequence[str], mark: str = "") -> str:
        parts = (
            f"<{tag}{' class=number' if column in right else ''}>{mark if column == 0 else ''}{shown(text)}</{tag}>"
            for column, text in enumerate(row)
        )
        return f"<tr>{''.join(parts)}</tr>"

    marks = map(_key, colours)
    body = (cells("td", row, mark) for row, mark in itertools.zip_longest(rows, marks, fillvalue="") if row)
    return f'<div class="wide"><table>{cells("th", names)}{"".join(body)}</table></div>'
