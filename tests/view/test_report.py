"""The page about a run: whole, self-contained, and safe to open, whatever stands in the journals."""

import json
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from decentral.commands import report, simulate
from decentral.core.journal.peer_totals import MOST_LIVES
from decentral.sim import sweep
from decentral.view.charts import CROWD, RunCharts, reasons_of
from decentral.view.report import page_of
from decentral.view.run_history import PeerHistory, RunHistory, history_of

QUICK = [word for setting in sweep.SETTINGS for word in ("--set", setting)]
FAULTS = "crash 1 at 12; restart 1 at 15"
EVIL = '<script src="http://evil.example/x.js">alert(1)</script>"\'><img src=x onerror=alert(1)>'
VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Notes what the page is made of, and fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        asked = (value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "srcset"))
        self.addresses += [address for address in asked if not address.startswith("#")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three simulated peers of which one is killed and comes back."""
    folder = tmp_path_factory.mktemp("run")
    small = ["--peers", "3", "--seconds", "40", "--seed", "5", *QUICK, "--faults", FAULTS]
    assert simulate.main([*small, "--json", "--journals", str(folder)]) == 0
    return folder


def read(folder: Path) -> RunHistory:
    return history_of((path.parent.name, path) for path in sorted(folder.glob("*/journal.jsonl")))


def test_it_writes_one_page_that_asks_for_nothing(
    journals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.html"
    assert report.main([str(journals), "-o", str(out)]) == 0
    assert "3 peers" in capsys.readouterr().out
    text = out.read_text()
    page = Page(text)
    assert page.addresses == []
    assert page.tags["script"] == 0
    assert "url(" not in text.replace("url(#", "")
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/", "")  # names of SVG itself
    assert "default-src 'none'" in text
    assert page.tags["svg"] == 7


def test_the_page_says_what_the_journals_say(journals: Path) -> None:
    run = read(journals)
    lines = [json.loads(line) for path in journals.glob("*/journal.jsonl") for line in path.read_text().splitlines()]
    assert run.tokens == sum(line["tokens"] for line in lines if line["event"] == "step")
    counted = Counter((line["outcome"], line["reason"]) for line in lines if line["event"] == "exchange")
    assert reasons_of(run) == counted
    assert [len(peer.lives) for peer in run.peers] == [1, 2, 1]
    assert run.peers[1].lives[0].ended == ""  # it was killed
    for peer in run.peers:
        assert sum(peer.totals.whole.spent.shares().values()) == pytest.approx(1)
    texts = Page(page_of(run)).texts
    for peer in run.peers:
        assert peer.name in texts
    assert "✕" in texts


def test_without_matplotlib_the_page_has_the_tables_and_one_line_says_what_is_missing(
    journals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "run.html"
    assert report.main([str(journals), "-o", str(out)]) == 0
    assert capsys.readouterr().err == "no charts: they need matplotlib: pip install 'decentral[plot]'\n"
    page = Page(out.read_text())
    assert page.tags["svg"] == 0
    assert page.tags["table"] == 2


def test_totals_do_not_fall_when_a_peer_starts_again(journals: Path) -> None:
    for peer in read(journals).peers:
        for column in (peer.tokens, peer.sent, peer.received):
            assert list(column.value) == sorted(column.value)
            assert list(column.t) == sorted(column.t)


def test_what_others_wrote_is_text(tmp_path: Path) -> None:
    lines = [
        {"t": 1.0, "event": "started", "peer": EVIL, "run": EVIL, "device": EVIL, "throttle": 1},
        {"t": 2.0, "event": "error", "reason": EVIL},
        {"t": 2.0, "event": "exchange", "outcome": "failed", "reason": EVIL},
        {"t": 3.0, "event": "stopped", "reason": EVIL},
    ]
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(page_of(history_of([(EVIL, path)])))
    assert page.tags["script"] == page.tags["img"] == 0
    assert page.addresses == []
    assert any("<script" in text for text in page.texts)  # for people to read


BAD = [
    '{"t": "now", "event": "step"}',
    '{"t": 1e200, "event": "joined"}',
    '{"t": -5, "event": "joined"}',
    '{"t": 2, "event": "step", "tokens": [], "loss": 1, "seconds": 1, "aside": {}}',
    '{"t": 2, "event": "step", "tokens": 1e999, "loss": 1, "seconds": 1, "aside": {}}',
    '{"t": 2, "event": "step", "tokens": true, "loss": 1, "seconds": 1, "aside": {}}',
    '{"t": 2, "event": "step", "tokens": 5, "loss": 1, "seconds": 1, "aside": 7}',
    '{"t": 2, "event": "exchange", "outcome": "stolen", "reason": ""}',
    '{"t": 2, "event": ["step"]}',
    '{"t": 2, "event": "eval", "loss": NaN}',
]


@pytest.mark.parametrize("line", BAD)
def test_a_line_that_is_not_as_it_should_be_is_counted_and_passed_over(tmp_path: Path, line: str) -> None:
    good = '{"t": 1, "event": "started", "peer": "QmA", "run": "r", "device": "cpu", "throttle": 1}'
    step = '{"t": 3, "event": "step", "tokens": 10, "loss": 2.5, "seconds": 1, "aside": {"waiting": 1}}'
    path = tmp_path / "journal.jsonl"
    path.write_text(f"{good}\n{line}\n{step}\n")
    run = history_of([("a", path)])
    assert [peer.bad for peer in run.peers] == [1]
    assert run.tokens == 10
    assert "1 line of the journals could not be read" in page_of(run)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3) | st.just("done"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["gossip", "waiting"]), inner),
    max_leaves=3,
)
EVENTS = ["started", "step", "exchange", "traffic", "eval", "plan", "joined", "stopped"]
OTHERS = ["peer", "run", "device", "throttle", "tokens", "loss", "seconds", "aside", "outcome", "reason", "sent_bytes"]
FIELDS = st.fixed_dictionaries(
    {"t": VALUES, "event": st.sampled_from(EVENTS)},
    optional=dict.fromkeys([*OTHERS, "received_bytes"], VALUES),
)


@given(st.lists(FIELDS, max_size=6))
@settings(max_examples=10)  # each draws a whole page
def test_any_lines_make_a_page(lines: list[dict[str, object]]) -> None:
    peer = PeerHistory("a")
    for line in lines:
        peer.take(line)
    Page(page_of(RunHistory([peer])))


def test_a_journal_of_many_starts_makes_a_page_of_a_usual_size(tmp_path: Path) -> None:
    starts, path = 20 * MOST_LIVES, tmp_path / "journal.jsonl"
    started = '{"t": %d, "event": "started", "peer": "QmA", "run": "r", "device": "cpu", "throttle": 1}\n'
    step = '{"t": %d.5, "event": "step", "tokens": 10, "loss": 2.5, "seconds": 1, "aside": {}}\n'
    path.write_text("".join(started % t + step % t for t in range(1, starts + 1)))
    run = history_of([("a", path)])
    (peer,) = run.peers
    assert len(peer.lives) == MOST_LIVES
    assert (peer.began, peer.last, peer.totals.starts) == (1.0, starts + 0.5, starts)
    text = page_of(run)
    assert len(text) < 1_000_000
    assert f"{starts}" in Page(text).texts


def test_many_peers_share_a_colour_and_the_rows_end(tmp_path: Path) -> None:
    for number in range(130):
        folder = tmp_path / f"peer-{number}"
        folder.mkdir()
        started = {"t": 1.0, "event": "started", "peer": f"peer{number}", "run": "r", "device": "cpu", "throttle": 1}
        (folder / "journal.jsonl").write_text(
            json.dumps(started) + "\n" + json.dumps({"t": 9.0, "event": "joined"}) + "\n"
        )
    run = read(tmp_path)
    assert set(RunCharts(run).colours()) == {CROWD}
    assert "and 10 more peers" in RunCharts(run).presence()
    Page(page_of(run))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["{}/none"], "does not exist"), (["{}", "-o", "{}/no/where.html"], "choose a place that can be written")],
)
def test_what_is_wrong_is_one_line(
    journals: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert report.main([one.format(journals) for one in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
