"""The documents name what there is: reasons, messages, paths, commands, links, and a line for every product file."""

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from decentral.comm.wire.messages import VERSION, Message
from decentral.core.config import Config
from decentral.core.journal.events import JournalEvent
from decentral.core.journal.lines import name_of
from decentral.core.reasons import Reason
from decentral.sim.invariants.convergence import MAX_DRIFT

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(doc.relative_to(ROOT)) for doc in DOCS]
PRODUCT = ("comm", "peers", "scheduler", "decentral")
TOP = (*PRODUCT, "tests", "benchmarks", "configs", "docs")
PLACEHOLDER = "NAME"  # in a recipe: a file that its reader will write

PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(TOP)})/[\w./-]*\w|[\w./-]+/[\w-]+\.py)")
COMMAND = re.compile(r"python -m ((?:decentral|benchmarks)\.\w+)")
TARGET = re.compile(r"(?:^ {4}|`)make (\w+)", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
KEY = re.compile(r"(?<![\w./-])(\w+)\.(?!safetensors)(\w+)(?=[`=])")


def section(doc: str, title: str) -> str:
    """The text below this heading, down to the next one of its level."""
    level = title.split()[0]
    text = (ROOT / doc).read_text()
    assert f"\n{title}\n" in text, f"{doc} has no heading {title!r}"
    return re.split(rf"^{level} ", text.split(f"\n{title}\n")[1], flags=re.MULTILINE)[0]


def product_files() -> set[str]:
    """Every module; the links to other folders in decentral/ are not followed."""
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]
    names = {str(path.relative_to(ROOT)) for path in files}
    return {name for name in names if not name.startswith(tuple(f"decentral/{linked}/" for linked in TOP))}


def anchors(doc: Path) -> set[str]:
    """The fragments of links to this document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", doc.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_each_reason_stands_in_the_protocol_s_table_once_and_nothing_else_does() -> None:
    rows = [line.split("|")[2] for line in section("docs/PROTOCOL.md", "## Reasons").splitlines() if "|" in line]
    named = Counter(word for row in rows for word in re.findall(r"`([^`]+)`", row))
    assert named == Counter(reason.value for reason in Reason)


def test_each_message_has_a_place_in_the_protocol() -> None:
    questions = section("docs/PROTOCOL.md", "## Questions and answers")
    named = set(re.findall(r"`(\w+)`", questions))
    assert {kind.__name__ for kind in Message.__args__} <= named


def test_each_event_of_the_journal_and_each_of_its_fields_stands_in_the_protocol_s_table() -> None:
    rows = [
        line.split("|") for line in section("docs/PROTOCOL.md", "## Journal").splitlines() if line.startswith("| `")
    ]
    told = {name: set(re.findall(r"\w+", row[2])) for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    told["continued"] |= told["started"]
    kinds = {name_of(kind): kind for kind in JournalEvent.__args__}
    assert told.keys() == kinds.keys()
    for name, kind in kinds.items():
        assert {field.name for field in fields(kind)} <= told[name], name


def test_the_protocol_s_title_has_its_version() -> None:
    assert (ROOT / "docs/PROTOCOL.md").read_text().startswith(f"# Protocol, version {VERSION}\n")


def test_the_run_that_two_pages_show_is_the_same_one() -> None:
    shown = [re.findall(r"^    6 peers, 120 virtual.*?\n\n", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)
             for name in ("README.md", "docs/SIMULATOR.md")]  # fmt: skip
    assert len(shown[0]) == 1
    assert shown[0] == shown[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_a_document_names_is_there(name: str) -> None:
    named = {path for path in PATH.findall((ROOT / name).read_text()) if PLACEHOLDER not in path}
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


@pytest.mark.parametrize("name", NAMES)
def test_a_command_that_a_document_names_is_there(name: str) -> None:
    text = (ROOT / name).read_text()
    found = set(COMMAND.findall(text)) - {f"decentral.{PLACEHOLDER}"}
    named = {module.replace("decentral.", "decentral.commands.") for module in found}
    commands = {ROOT / module.replace(".", "/") for module in named}
    assert not [path for path in commands if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(TARGET.findall(text)) <= targets


@pytest.mark.parametrize("name", NAMES)
def test_a_key_of_the_config_that_a_document_names_is_one(name: str) -> None:
    kinds = {section: field.annotation for section, field in Config.model_fields.items()}
    keys = {section: getattr(kind, "model_fields", {}) for section, kind in kinds.items()}
    known = {(section, field.alias or key) for section, own in keys.items() for key, field in own.items()}
    named = {pair for pair in KEY.findall((ROOT / name).read_text()) if pair[0] in kinds}
    assert not named - known


@pytest.mark.parametrize("name", NAMES)
def test_a_link_leads_somewhere(name: str) -> None:
    for link in LINK.findall((ROOT / name).read_text()):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert link.startswith("http") or target.exists(), link
        assert not anchor or link.startswith("http") or anchor in anchors(target), link


def test_every_page_of_results_is_linked_from_a_document() -> None:
    linked = {
        ((ROOT / name).parent / link.partition("#")[0]).resolve()
        for name in NAMES
        for link in LINK.findall((ROOT / name).read_text())
    }
    assert not [page.name for page in (ROOT / "docs" / "results").glob("*.md") if page not in linked]


def test_each_product_file_has_one_line_in_the_file_map() -> None:
    lines = re.findall(r"^- `([\w/.]+)`: .+$", section("docs/ARCHITECTURE.md", "## File map"), re.MULTILINE)
    assert Counter(lines) == Counter(product_files())


def test_no_walk_passes_a_file_twice_but_for_two_returns() -> None:
    walks = re.split(r"^### ", section("docs/ARCHITECTURE.md", "## Walks"), flags=re.MULTILINE)[1:]
    assert len(walks) == 6
    for walk in walks:
        passed = Counter(re.findall(r"^\d+\. `([\w/.]+)`: ", walk, re.MULTILINE))
        assert sorted(passed.values())[-3:] in ([1, 1, 1], [1, 1, 2], [1, 2, 2]), walk.splitlines()[0]


def test_the_simulator_s_page_has_the_drift_that_the_audit_allows() -> None:
    (row,) = [line for line in (ROOT / "docs/SIMULATOR.md").read_text().splitlines() if line.startswith("| drift |")]
    assert row.split("|")[3].split()[0] == f"{MAX_DRIFT}"
