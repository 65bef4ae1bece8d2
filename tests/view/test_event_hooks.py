"""Hooks: what happens to a peer reaches programs and chats, and a hook that hangs or fails costs the peer nothing."""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from decentral.commands import peer
from decentral.core.errors import UserError
from decentral.core.journal.events import HookLine, JournalEvent
from decentral.core.journal.file import Journal, read
from decentral.core.journal.lines import JOURNAL_LINES, recorded
from decentral.view import event_hooks
from decentral.view.event_hooks import (
    QUEUED_MESSAGES,
    CommandHook,
    HookedJournal,
    Hooks,
    HookThread,
    hooks_running,
)
from decentral.view.hook_messages import (
    HOOK_KINDS,
    MESSAGE_BYTES,
    MESSAGE_CHARS,
    HookMessage,
    Messages,
    hook_kind,
    kinds_of,
)
from decentral.view.webhook import POST_TRIES, Webhook, body_for
from tests.journal_lines import event_of
from tests.patient_time import LIMIT_S

NOW = 1.7e9
OTHER = "Qm" + "x" * 38 + "x3kPq2"
STARTED: dict[str, Any] = {"peer": "Qm" + "a" * 38 + "aaaaaa", "run": "gpt-3fa2c1", "device": "cpu", "name": "ann"}
HAPPENED: dict[str, tuple[str, dict[str, Any]]] = {  # kind -> a line of the journal, and its fields
    "started": ("started", STARTED),
    "training": ("joined", {"peers": 2, "donors": [], "seconds": 1.5}),
    "peer_joined": ("peer_joined", {"peer": OTHER, "device": "gpu", "name": "bob"}),
    "checkpoint": ("checkpoint", {"step": 40, "bytes": 1_400_000_000, "seconds": 3.0}),
    "plan_adopted": ("plan", {"digest": "ab", "cost": 1200.0, "reason": "more tokens"}),
    "moved": ("move", {"outcome": "done", "first": 2, "last": 4, "seconds": 3.0}),
    "layers_lost": ("unheld", {"reason": "no peer that trains holds layer 3", "first": 3, "last": 4}),
    "layers_back": ("held", {}),
    "trouble": ("error", {"reason": "the disk is full"}),
    "diverged": ("error", {"reason": "training has diverged: the mean loss has risen"}),
    "wrong_gradient": ("audit", {"verdict": "wrong", "of": [OTHER, 7, 0]}),
    "revoked": ("revoked", {"number": 1}),
    "peer_left": ("peer_left", {"peer": OTHER, "reason": "left"}),
    "peer_lost": ("peer_left", {"peer": OTHER, "reason": "silent"}),
    "stopped": ("stopped", {"reason": "interrupted"}),
    "finished": ("stopped", {"reason": "--stop-after reached"}),
}


def happened(kind: str) -> JournalEvent:
    name, fields = HAPPENED[kind]
    return event_of(name, **fields)


def message(kind: str, **fields: Any) -> HookMessage:
    """The message about an event of this kind, of a peer that has met another one."""
    messages = Messages()
    for before in ("started", "peer_joined"):
        messages.of(NOW, happened(before))
    name, known = HAPPENED[kind]
    found = messages.of(NOW, event_of(name, **{**known, **fields}))
    assert found is not None
    return found


class Receiver(ThreadingHTTPServer):
    """A web server that keeps what is posted to it, and answers with `status`; if `hangs`, it answers never."""

    daemon_threads = True

    def __init__(self, status: int = 200, hangs: bool = False) -> None:
        self.status, self.hangs = status, hangs
        self.got: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.free = threading.Event()  # set when the test is over, so that no thread outlives it
        super().__init__(("127.0.0.1", 0), _Post)
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?key=1"

    def close(self) -> None:
        self.free.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Post(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.put({"path": self.path, "type": self.headers["content-type"], "body": json.loads(body)})
        if self.server.hangs:
            self.server.free.wait(LIMIT_S)
            return
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def test_every_kind_of_event_is_known_and_has_one_sentence() -> None:
    assert set(HAPPENED) == set(HOOK_KINDS), "add each to HAPPENED of tests/view/test_event_hooks.py"
    for kind in HAPPENED:
        assert hook_kind(happened(kind)) == kind
        found = message(kind)
        assert (found.event, found.run, found.name) == (kind, "gpt-3fa2c1", "ann")
        assert found.text.isprintable()
        assert found.text


def test_what_happens_many_times_a_second_is_told_to_nobody() -> None:
    for name, fields in (("step", {}), ("exchange", {"outcome": "done"}), ("traffic", {}), ("hook", {})):
        assert hook_kind(event_of(name, **fields)) is None


def test_sixteen_kinds_of_event_reach_a_real_web_server_within_five_seconds(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = Hooks([Webhook.parse(receiver.url)])
    journal = HookedJournal(tmp_path / "journal.jsonl", lambda: NOW, hooks)
    got: list[dict[str, Any]] = []

    async def story() -> None:
        async with hooks_running(hooks, journal, print):
            for kind in HAPPENED:
                journal.write(happened(kind))
                got.append(await asyncio.to_thread(receiver.got.get, timeout=5.0))

    asyncio.run(story())
    journal.close()
    assert [one["body"]["event"] for one in got] == list(HAPPENED)
    assert {one["path"] for one in got} == {"/hook?key=1"}
    assert {one["type"] for one in got} == {"application/json"}
    (lost,) = [one["body"] for one in got if one["body"]["event"] == "peer_lost"]
    assert lost == {
        "event": "peer_lost",
        "time": "2023-11-14T22:13:20.000+00:00",
        "level": "bad",
        "text": "peer x3kPq2 (bob) is lost (silent)",
        "run": "gpt-3fa2c1",
        "peer": STARTED["peer"],
        "name": "ann",
        "details": {"peer": OTHER, "reason": "silent"},
    }
    assert len(list(read(journal.path))) == len(HAPPENED)


class Kept:
    """A hook that keeps the kinds of its messages."""

    flag, tries = "--on-event", 1

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def deliver(self, message: HookMessage) -> None:
        self.kinds.append(message.event)

    def end(self) -> None:
        pass


def test_strangers_that_join_and_leave_a_thousand_times_displace_and_delay_no_other_message() -> None:
    hooks = Hooks([kept := Kept()])
    for number in range(1000):
        for name, fields in (("peer_joined", {"name": "x"}), ("peer_left", {"reason": "silent"})):
            hooks.tell(NOW, event_of(name, peer=f"Qm{number:044d}", **fields))
        if number == 0:
            hooks.tell(NOW, happened("started"))
    alarms = ["layers_lost", "diverged"]
    for kind in alarms:
        hooks.tell(NOW, happened(kind))
    (thread,) = hooks.threads
    thread.start()
    thread.close()
    assert set(alarms) <= set(kept.kinds[:6])
    assert thread.counts.delivered + thread.counts.dropped == 2000 - 2 + 3
    assert thread.counts.dropped > 0


def test_a_hook_is_told_of_the_kinds_that_its_user_wants(receiver: Receiver) -> None:
    hooks = Hooks([Webhook.parse(receiver.url)], kinds_of("peer_lost,finished"))
    for kind in HAPPENED:
        hooks.tell(NOW, happened(kind))
    (thread,) = hooks.threads
    thread.start()
    thread.close()
    assert [receiver.got.get(timeout=LIMIT_S)["body"]["event"] for _ in range(2)] == ["peer_lost", "finished"]
    with pytest.raises(Empty):
        receiver.got.get_nowait()
    with pytest.raises(UserError, match=r"got 'peer_lots'; did you mean peer_lost\?"):
        kinds_of("finished,peer_lots")


def test_a_webhook_that_hangs_costs_no_time_and_its_drops_stand_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(event_hooks, "REPORTED_S", 0.01)
    monkeypatch.setattr(event_hooks, "LAST_S", 0.01)
    receiver = Receiver(hangs=True)
    hooks = Hooks([Webhook.parse(receiver.url)])
    journal = HookedJournal(tmp_path / "journal.jsonl", lambda: NOW, hooks)
    others = 50

    async def story() -> None:
        async with hooks_running(hooks, journal, print):
            journal.write(happened("started"))
            await asyncio.to_thread(receiver.got.get, timeout=LIMIT_S)  # the request that is never answered
            for _ in range(QUEUED_MESSAGES + others):
                journal.write(happened("trouble"))
            while not any(isinstance(line.event, HookLine) for line in recorded(read(journal.path))):
                await asyncio.sleep(0.01)

    asyncio.run(story())
    journal.close()
    receiver.close()
    found = [line.event for line in recorded(read(journal.path)) if isinstance(line.event, HookLine)]
    assert found[0] == HookLine(
        hook="--webhook",
        delivered=0,
        failed=0,
        dropped=QUEUED_MESSAGES // 2 + others,  # one kind gets half of the room
        reason=f"more than {QUEUED_MESSAGES} messages waited",
    )
    assert "warning: --webhook failed: more than 256 messages waited; training goes on" in capsys.readouterr().out
    assert hooks.threads[0].counts.delivered == 0


def test_a_request_that_gets_no_answer_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hooks, "HOOK_S", 0.05)
    receiver = Receiver(hangs=True)
    try:
        with pytest.raises(OSError, match=r"timed out|no answer"):
            Webhook.parse(receiver.url).deliver(message("trouble"))
    finally:
        receiver.close()


@pytest.mark.parametrize("status", [302, 404, 500])
def test_an_answer_that_refuses_is_tried_again_and_then_counts_as_failed(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_hooks, "PAUSE_S", 0.0)
    receiver = Receiver(status)
    thread = HookThread(Webhook.parse(receiver.url))
    thread.tell(message("trouble"))
    thread.start()
    for _ in range(POST_TRIES):
        receiver.got.get(timeout=LIMIT_S)
    thread.close()
    receiver.close()
    assert (thread.counts.delivered, thread.counts.failed) == (0, 1)
    assert thread.counts.reason == f"answer with status {status}"


def test_nobody_at_the_address_is_a_failure_like_any_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        Webhook.parse(f"http://127.0.0.1:{port}/").deliver(message("trouble"))


@pytest.mark.parametrize(
    "url",
    [
        *("", "example.org/hook", "ftp://example.org", "http://", "http://a b/", "http://a:x/"),
        *(
            "http://a..b/",
            f"http://{'a' * 64}.example/",
        ),  # no lookup takes them, and a lookup's error would end the thread
    ],
)
def test_what_is_no_address_of_the_web_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(UserError, match="--webhook expects a URL"):
        Webhook.parse(url)


# Chats


def test_a_name_that_somebody_chose_mentions_nobody_and_makes_no_link_in_a_chat() -> None:
    messages = Messages()
    messages.of(NOW, happened("started"))
    name = "<!channel> @everyone & http://x"
    found = messages.of(NOW, event_of("peer_joined", peer=OTHER, name=name))
    assert found is not None
    slack = json.loads(body_for("hooks.slack.com", found))
    assert slack == {
        "text": "aaaaaa (ann), run gpt-3fa2c1: peer x3kPq2 (&lt;!channel&gt; @everyone &amp; http: //x) joined",
        "parse": "none",
        "unfurl_links": False,
        "unfurl_media": False,
    }
    discord = json.loads(body_for("discord.com", found))
    assert discord["allowed_mentions"] == {"parse": []}
    assert (discord["flags"], len(discord["content"]) <= 2000, "://" in discord["content"]) == (4, True, False)
    assert json.loads(body_for("example.org", found))["event"] == "peer_joined"


def test_a_name_with_escapes_and_a_reason_of_any_length_become_a_bounded_printable_message() -> None:
    found = message("peer_lost", reason="\x1b[2J" + "x" * 60_000)
    assert found.text.isprintable()
    assert len(found.text) <= MESSAGE_CHARS
    packed = found.packed()
    assert len(packed) <= MESSAGE_BYTES
    assert json.loads(packed)["details"] == {}


# Commands

KEEPS = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_bytes(sys.stdin.buffer.read())"


def test_a_command_gets_the_message_on_stdin_and_nothing_from_others_in_its_arguments(tmp_path: Path) -> None:
    got = tmp_path / "it's here"
    hook = CommandHook.parse(f"{sys.executable} -I -S -c '{KEEPS}' \"{got}\"")
    hostile = message("peer_lost", reason="$(touch /tmp/x); `id`\n; rm -rf ~")
    hook.deliver(hostile)
    assert json.loads(got.read_text())["details"]["reason"] == "$(touch /tmp/x); `id`\n; rm -rf ~"


def test_a_command_that_hangs_is_killed_with_what_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hooks, "HOOK_S", 0.05)
    with pytest.raises(OSError, match=r"it took longer than 0\.05 s"):
        CommandHook(["sh", "-c", "sleep 1000 & sleep 1000"]).deliver(message("trouble"))


def test_a_command_that_fails_is_counted_and_not_run_again(tmp_path: Path) -> None:
    thread = HookThread(CommandHook([sys.executable, "-I", "-S", "-c", "raise SystemExit(3)"]))
    thread.tell(message("trouble"))
    thread.start()
    while not thread.counts.failed:
        thread.join(0.01)
    thread.close()
    assert thread.counts.reason == "exit code 3"


def test_a_command_that_is_not_there_is_refused_before_the_peer_starts(tmp_path: Path) -> None:
    for wrong in ("", "no-such-program --now", "echo 'open"):
        with pytest.raises(UserError, match="--on-event"):
            peer.parse(["--on-event", wrong, "--state-dir", str(tmp_path)])
    with pytest.raises(UserError, match="--events needs --on-event CMD or --webhook URL"):
        peer.parse(["--events", "finished"])


def test_a_disk_that_refuses_the_line_keeps_no_hook_from_its_message(receiver: Receiver, tmp_path: Path) -> None:
    hooks = Hooks([Webhook.parse(receiver.url)])
    journal = HookedJournal(tmp_path / "journal.jsonl", lambda: NOW, hooks)
    journal.write(happened("started"))
    journal.close()
    (tmp_path / "journal.jsonl").unlink()
    (tmp_path / "journal.jsonl").mkdir()
    journal.write(happened("trouble"))
    assert journal.lost == 1
    (thread,) = hooks.threads
    thread.start()
    assert [receiver.got.get(timeout=LIMIT_S)["body"]["event"] for _ in range(2)] == ["started", "trouble"]
    thread.close()


def test_a_journal_without_hooks_is_the_same_file(tmp_path: Path) -> None:
    plain, hooked = Journal(tmp_path / "a", lambda: NOW), HookedJournal(tmp_path / "b", lambda: NOW, Hooks([]))
    for kind in HAPPENED:
        plain.write(happened(kind))
        hooked.write(happened(kind))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert JOURNAL_LINES.name(happened("moved")) == "move"
