"""The documents name what there is: reasons, messages, paths, commands, flags, keys, links, the steps of walks."""

import re
import tomllib
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.outer_kernels import PSEUDO_GRADIENT_CODEC
from decentral.comm.wire.messages import VERSION, Message
from decentral.commands.table import COMMANDS
from decentral.core.config import Config, GossipConfig
from decentral.core.journal.events import JournalEvent
from decentral.core.journal.lines import name_of
from decentral.core.reasons import Reason
from decentral.sim.invariants.convergence import MAX_DRIFT
from decentral.view.hook_messages import HOOK_KINDS
from docs import stage

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(doc.relative_to(ROOT)) for doc in DOCS]
CONFIGS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "configs").rglob("*.yaml"))]
PRODUCT = ("comm", "peers", "scheduler", "decentral")
TOP = (*PRODUCT, "tests", "benchmarks", "configs", "docs")
MAP_LINE = 200  # characters of a module's first sentence, so that the file map can be looked through
PLACEHOLDER = "NAME"  # in a recipe: a file that its reader will write

PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(TOP)})/[\w./-]*\w|[\w./-]+/[\w-]+\.py\b)")
COMMAND = re.compile(r"python -m ((?:decentral|benchmarks)(?:\.\w+)+)")
TARGET = re.compile(r"(?:^ {4}|`)make (\w+)", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAGS = re.compile(r"(?:python -m decentral\.|(?<![\w./-])decentral )(\w+)((?:[^`#\n]|\\\n)*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
STEP = re.compile(r"^\d+\. (?:`([\w/.]+)` `(\w+)`)?", re.MULTILINE)
KEY = re.compile(r"(?<![\w./-])(\w+)\.(?!safetensors|md\b|yaml\b)(\w+)")
PLACED = re.compile(r"((?:`[A-Za-z_][\w.]*`(?:, | and )?)+) (?:of|in|\() ?`([\w/]+\.(?:py|js))`")
CHECK = re.compile(r"\b(?:ok|warn|wrong|unknown|rate)\(\s*\"([^\"]+)\"")


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


@cache
def flags_of(command: str) -> frozenset[str]:
    """Return the flags that the help of a command shows."""
    return frozenset(FLAG.findall(stage.help_of(command)))


@cache
def source_files() -> tuple[Path, ...]:
    """Return the paths of all code that documents may name."""
    found = [path for folder in TOP for kind in ("*.py", "*.js") for path in (ROOT / folder).rglob(kind)]
    return tuple(path for path in found if not path.is_symlink())


def anchors(doc: Path) -> set[str]:
    """The fragments of links to this document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", doc.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_each_reason_has_its_meaning_on_the_page_of_reasons() -> None:
    assert re.findall(r"^\| `(.+)` \| \w.+ \|$", stage.reasons(), re.MULTILINE) == [one.value for one in Reason]


def test_each_message_has_a_place_in_the_protocol() -> None:
    questions = section("docs/PROTOCOL.md", "## Questions and answers")
    named = set(re.findall(r"`(\w+)`", questions))
    assert {kind.__name__ for kind in Message.__args__} <= named


def test_each_event_of_the_journal_and_each_of_its_fields_stands_in_the_protocol_s_table() -> None:
    rows = [line.split("|") for line in section("docs/PROTOCOL.md", "## Journal").splitlines() if line.startswith("`")]
    told = {name: set(re.findall(r"\w+", row[1])) for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    told["continued"] |= told["started"]
    kinds = {name_of(kind): kind for kind in JournalEvent.__args__}
    assert told.keys() == kinds.keys()
    for name, kind in kinds.items():
        assert {field.name for field in fields(kind)} <= told[name], name


def test_the_protocol_s_title_has_its_version_and_no_page_another() -> None:
    assert (ROOT / "docs/PROTOCOL.md").read_text().startswith(f"# Protocol, version {VERSION}\n")
    named = {number for name in NAMES for number in re.findall(r"protocol (\d+)", (ROOT / name).read_text())}
    assert named <= {str(VERSION)}


def test_each_code_of_windows_stands_in_the_protocol_and_in_the_config() -> None:
    offered = get_args(GossipConfig.model_fields["code"].annotation)
    assert {*offered} == {"auto", PSEUDO_GRADIENT_CODEC, *blockwise.SHORTER_CODECS}
    assert {*offered} - {"auto"} <= set(re.findall(r"\w+", (ROOT / "docs/PROTOCOL.md").read_text()))


def test_each_check_of_the_doctor_has_its_row() -> None:
    rows = [line.split("|")[1] for line in section("docs/DOCTOR.md", "## What it finds").splitlines() if "|" in line]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    text = "".join(path.read_text() for path in (ROOT / "decentral/commands/checks").glob("*.py"))
    assert {*CHECK.findall(text)} <= named <= {*re.findall(r'"([^"\n]+)"', text)}


def test_each_kind_of_event_that_hooks_get_stands_in_its_list() -> None:
    (told,) = re.findall(r"Kinds, all\s+without `--events`: ([^.]*)\.", (ROOT / "docs/OBSERVING.md").read_text())
    assert sorted(re.findall(r"`(\w+)`", told)) == sorted(HOOK_KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_in_the_file_in_which_a_document_says_it_is(name: str) -> None:
    for names, place in PLACED.findall(" ".join((ROOT / name).read_text().split())):
        if PLACEHOLDER not in place:
            texts = [path.read_text() for path in source_files() if f"/{path}".endswith(f"/{place}")]
            last = {one.rpartition(".")[2] for one in re.findall(r"`([\w.]+)`", names)}
            assert not [one for one in last if not any(re.search(rf"\b{one}\b", text) for text in texts)], place


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_a_document_names_is_there(name: str) -> None:
    text = LINK.sub("", (ROOT / name).read_text())  # links have a test of their own
    named = {path for path in PATH.findall(text) if PLACEHOLDER not in path}
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
def test_a_flag_that_a_document_gives_a_command_is_one_of_its_flags(name: str) -> None:
    for command, rest in FLAGS.findall((ROOT / name).read_text()):
        if command in COMMANDS:
            assert set(FLAG.findall(rest.partition(" -- ")[0])) <= flags_of(command), command


@pytest.mark.parametrize("name", [*NAMES, *CONFIGS])
def test_a_key_of_the_config_that_a_document_or_config_names_is_one(name: str) -> None:
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


@pytest.mark.parametrize("name", NAMES)
def test_a_diagram_has_no_semicolon_since_mermaid_takes_it_for_the_end_of_a_line(name: str) -> None:
    assert not [one for one in re.findall(r"```mermaid\n(.*?)```", (ROOT / name).read_text(), re.DOTALL) if ";" in one]


def test_every_page_of_results_is_linked_from_a_document() -> None:
    linked = {
        ((ROOT / name).parent / link.partition("#")[0]).resolve()
        for name in NAMES
        for link in LINK.findall((ROOT / name).read_text())
    }
    assert not [page.name for page in (ROOT / "docs" / "results").glob("*.md") if page not in linked]


def test_a_module_opens_with_a_sentence_that_is_its_line_in_the_file_map() -> None:
    lines = {path: stage.first_sentence((ROOT / path).read_text()) for path in product_files()}
    assert {path: line for path, line in lines.items() if not line.endswith(".") or len(line) > MAP_LINE} == {}


def test_a_page_that_a_module_names_is_there() -> None:
    named = {path: set(re.findall(r"docs/[\w/-]+\.md", (ROOT / path).read_text())) for path in product_files()}
    assert {(path, page) for path, pages in named.items() for page in pages if not (ROOT / page).exists()} == set()


def test_the_file_map_has_each_module_once() -> None:
    assert Counter(re.findall(r"^- `([\w/.]+)`: ", stage.file_map(), re.MULTILINE)) == Counter(product_files())


def test_each_step_of_a_walk_names_a_function_of_its_file() -> None:
    walks = re.split(r"^### ", section("docs/ARCHITECTURE.md", "## Four walks"), flags=re.MULTILINE)[1:]
    assert len(walks) == 4
    for walk in walks:
        steps = STEP.findall(walk)
        assert len(steps) >= 5
        assert not [step for step in steps if f"def {step[1]}(" not in (ROOT / step[0]).read_text()]


def test_the_files_that_a_step_of_a_walk_names_define_its_private_functions() -> None:
    steps = re.findall(
        r"^\d+\. (.+?)(?=^\d+\. |^### |\Z)", section("docs/ARCHITECTURE.md", "## Four walks"), re.MULTILINE | re.DOTALL
    )
    for step in steps:
        paths = [ROOT / path for path in re.findall(r"`([\w/]+/\w+\.py)`", step)]
        beside = [paths[0].parent / name for name in re.findall(r"`(\w+\.py)`", step)]
        text = "".join(path.read_text() for path in [*paths, *beside])
        assert [name for name in re.findall(r"`(_\w+)`", step) if f"def {name}(" not in text] == []


def test_what_the_package_index_shows_leads_nowhere_into_the_checkout() -> None:
    readme = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    assert not [link for link in LINK.findall(readme["text"]) if not link.startswith("https://")]


def test_the_simulator_s_page_has_the_drift_that_the_audit_allows() -> None:
    (row,) = [line for line in (ROOT / "docs/SIMULATOR.md").read_text().splitlines() if line.startswith("| drift |")]
    assert row.split("|")[3].split()[0] == f"{MAX_DRIFT}"
