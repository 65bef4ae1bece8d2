"""What Prometheus reads of a real peer: its own parser takes it, its conventions hold, and each figure can fall."""

import asyncio
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from queue import SimpleQueue
from wsgiref.types import StartResponse

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from decentral.core.journal.events import ExchangeLine
from decentral.core.journal.peer_totals import ExchangeTotals
from decentral.core.time_spent import TimeSpent
from decentral.peers.membership.records import PeerPhase
from decentral.peers.runtime.host import Host
from decentral.peers.runtime.progress import TrainingSpeed
from decentral.view import metrics_server
from decentral.view.metrics import METRICS, PeerMetric
from decentral.view.metrics_server import MetricsServer, bound, metrics_served
from tests.commands.refusals import refusal
from tests.journal_lines import event_of
from tests.patient_time import LIMIT_S
from tests.peers.runtime.host_swarm import Swarm

ROOT = Path(__file__).parents[2]
HERE = ("127.0.0.1", 0)
UNITS = ("seconds", "bytes", "ratio", "info", "per_second")
NO_UNITS = ("milliseconds", "ms", "kilobytes", "megabytes", "percent", "minutes")

Scrape = dict[str, Metric]


async def scraped(url: str) -> Scrape:
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=LIMIT_S).read().decode())
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture
def two_scrapes(swarm: Swarm) -> tuple[Scrape, Scrape]:
    """Of one of two peers that train: when it has begun, and when both have exchanged."""
    found: list[Scrape] = []

    async def story() -> None:
        running = [await swarm.start("A")]
        async with metrics_served(bound(HERE), swarm.hosts["A"]) as url:
            found.append(await scraped(url))
            running.append(await swarm.start("B", contacts="A"))
            await swarm.until(lambda: swarm.all_have_exchanged(2))
            found.append(await scraped(url))
        for host in swarm.hosts.values():
            host.stop("enough")
        await asyncio.gather(*running)

    swarm.play(story())
    return found[0], found[1]


def values(scrape: Scrape, name: str) -> dict[tuple[str, ...], float]:
    family = scrape[name]
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def metric(name: str) -> PeerMetric:
    return next(one for one in METRICS if one.shown_name == name)


def value(host: Host, name: str, *labels: str) -> float:
    return metric(name).values(host, host.now())[labels]


def test_a_scraped_peer_has_the_table_s_metrics_and_its_counters_only_grow(two_scrapes: tuple[Scrape, Scrape]) -> None:
    before, after = two_scrapes
    counters = [one.name for one in METRICS if one.kind == "counter"]
    for name in counters:
        later = values(after, name)
        assert all(later[labels] >= number for labels, number in values(before, name).items()), name
    for name in ("decentral_tokens", "decentral_micro_batches", "decentral_sent_bytes"):
        assert values(after, name)[()] > values(before, name)[()], name
    assert values(after, "decentral_exchanges")["done", ""] >= 2
    assert sum(values(after, "decentral_peers").values()) == 1
    assert values(after, "decentral_phase") == {("joining",): 0, ("training",): 1, ("leaving",): 0}
    shares = values(after, "decentral_training_thread_ratio")
    assert sum(shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares.values())
    own = {name: family for name, family in after.items() if name.startswith("decentral_")}
    assert set(own) == {one.name for one in METRICS}
    for one in METRICS:
        assert own[one.name].type == one.kind, one.name
        assert all(set(sample.labels) == set(one.labels) for sample in own[one.name].samples), one.name


def test_names_follow_the_conventions_of_prometheus() -> None:
    names = [one.shown_name for one in METRICS]
    assert len(set(names)) == len(names)
    for one in METRICS:
        assert re.fullmatch(r"decentral(_[a-z]+)+", one.name), one.name
        assert not one.name.endswith("_total"), one.name
        assert not any(one.name.endswith(f"_{unit}") for unit in NO_UNITS), one.name
        assert one.help[0].isupper() or one.help[0] == "1", one.name
        assert not one.help.endswith("."), one.name
        assert "le" not in one.labels
        assert one.name.endswith("_info") == ("peer" in one.labels), one.name


def test_each_ratio_falls_when_what_it_measures_does(played: Callable[[], Swarm]) -> None:
    host = played().hosts["A"]
    assert {one.name for one in METRICS if one.name.endswith("_ratio")} == {
        "decentral_training_thread_ratio",
        "decentral_model_held_ratio",
        "decentral_model_flops_utilisation_ratio",
    }
    flops_per_token = sum(sum(one.work) for one in host.node.setup.fragments)
    host.node.progress.rate = TrainingSpeed(tokens_per_s=0.5 * host.node.setup.profile.flops / flops_per_token)
    assert value(host, "decentral_model_flops_utilisation_ratio") == pytest.approx(0.5)
    host.node.progress.spent = TimeSpent(training=9.0, waiting=1.0)
    assert value(host, "decentral_training_thread_ratio", "training") == pytest.approx(0.9)
    host.node.progress.spent = TimeSpent(training=9.0, waiting=9.0)
    assert value(host, "decentral_training_thread_ratio", "training") == pytest.approx(0.5)
    assert value(host, "decentral_model_held_ratio") == 1
    host.node.present.now = replace(host.node.setup, fragments=host.node.setup.fragments[1:])
    assert 0 < value(host, "decentral_model_held_ratio") < 1


def test_a_reason_that_another_peer_makes_up_is_no_label_of_its_own() -> None:
    counts = ExchangeTotals()
    for reason in ("deadline", "x1", "x2"):
        line = event_of("exchange", outcome="failed", reason=reason)
        assert isinstance(line, ExchangeLine)
        counts.take(line)
    assert counts.ended == {("failed", "deadline"): 1, ("failed", "other"): 2}
    assert counts.outcomes == {"failed": 3}


def test_a_port_that_is_taken_is_one_clear_line_before_a_state_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "peer"
    with socket.create_server(HERE) as taken:
        said = refusal(folder, "small", "--metrics", f"127.0.0.1:{taken.getsockname()[1]}")
    assert re.match(r"--metrics: 127\.0\.0\.1:\d+ cannot be used .*choose another port", said)
    assert not folder.exists()


class EndedByHand:
    """A threading.Timer whose time comes when the test says so."""

    begun: SimpleQueue[Callable[[], None]]  # what each does at its end

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        assert seconds == metrics_server.WHOLE_SCRAPE_S
        self.end = end

    def start(self) -> None:
        self.begun.put(self.end)

    def cancel(self) -> None:
        """Its time never comes by itself."""


def answer(_: object, start: StartResponse) -> list[bytes]:
    start("200 OK", [])
    return [b"metrics"]


@pytest.fixture
def answering() -> Iterator[MetricsServer]:
    """A server that answers "metrics"."""
    server = MetricsServer(HERE, answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_slow_client_keeps_no_scraper_out_and_is_disconnected(
    answering: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndedByHand, "begun", SimpleQueue(), raising=False)
    monkeypatch.setattr(threading, "Timer", EndedByHand)
    monkeypatch.setattr(metrics_server._Scrape, "timeout", None)  # a client that sends a byte now and then is not idle
    with socket.create_connection((answering.server_name, answering.server_port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        end = EndedByHand.begun.get(timeout=LIMIT_S)
        with urllib.request.urlopen(answering.url, timeout=LIMIT_S) as scrape:
            assert scrape.read() == b"metrics"
        end()
        assert slow.recv(1) == b""


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:9100", 200), ("localhost:9100", 200), ("[::1]:9100", 200), ("10.1.2.3", 200), ("evil.example", 421),
     ("127.0.0.1.evil.example:9100", 421), ("", 421)],
)  # fmt: skip
def test_a_page_of_somebody_else_whose_name_leads_here_reads_no_metrics(
    answering: MetricsServer, host: str, status: int
) -> None:
    connection = HTTPConnection(answering.server_name, answering.server_port, timeout=LIMIT_S)
    connection.request("GET", "/metrics", headers={"Host": host})
    got = connection.getresponse()
    assert (got.status, got.read() == b"metrics") == (status, status == 200)
    connection.close()


@pytest.mark.parametrize(
    ("greedy", "other"), [(["10.0.0.1"], "10.0.0.2"), ([f"2001:db8:1:{at}::1" for at in range(20)], "2001:db8:2::1")]
)
def test_one_network_gets_half_of_the_connections(greedy: list[str], other: str) -> None:
    """A customer with IPv6 may have a whole /48."""
    with MetricsServer(HERE, answer) as server:
        addresses = [*greedy * 20][:20] + [other]
        stay = list[str]()
        for address in addresses:
            client = socket.socket()
            if server.verify_request(client, (address, 5)):
                stay.append(address)
            else:
                server.shutdown_request(client)  # as socketserver does
        assert stay == addresses[: metrics_server.MOST_SCRAPES // 2] + [other]


def test_a_process_without_a_free_file_does_not_try_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()

    class Pause:
        def wait(self, seconds: float) -> None:
            pauses.append(seconds)

    with MetricsServer(HERE, answer) as server:
        server.socket.close()  # it accepts no connection then
        monkeypatch.setattr(threading, "Event", Pause)
        with pytest.raises(OSError, match="Bad file descriptor"):
            server.get_request()
    assert pauses == [metrics_server.ACCEPT_RETRY_S]


def test_the_dashboard_asks_only_for_metrics_that_there_are() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/decentral.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\b(?:decentral|process)_\w+", query)}
    assert asked <= {one.shown_name for one in METRICS} | {"process_resident_memory_bytes"}
    assert len(asked) > 15
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    labels = {label for query in queries for label in re.findall(r"(\w+)(?:=~|!=|=)\"", query)}
    assert labels <= {"instance", *(label for one in METRICS for label in one.labels)}


def test_the_metrics_that_the_page_about_them_names_are_there() -> None:
    named = set(re.findall(r"`(decentral_\w+)", (ROOT / "docs/OBSERVING.md").read_text()))
    assert named
    assert named <= {one.shown_name for one in METRICS}


def asked(url: str, path: str) -> tuple[int, str]:
    """The status and the text of an answer."""
    try:
        with urllib.request.urlopen(url.replace("/metrics", path), timeout=LIMIT_S) as answered:
            return answered.status, answered.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_peer_that_trains_is_healthy_and_ready_and_one_in_trouble_only_healthy(swarm: Swarm) -> None:
    found: list[tuple[int, str]] = []

    async def story() -> None:
        running = await swarm.start("A")
        host = swarm.hosts["A"]
        async with metrics_served(bound(HERE), host) as url:
            await swarm.until(lambda: host.node.phase is PeerPhase.TRAINING)
            found.extend([await asyncio.to_thread(asked, url, path) for path in ("/healthz", "/readyz")])
            host.watch.note("disk", "the disk is full\x1b[2J")
            found.extend([await asyncio.to_thread(asked, url, path) for path in ("/healthz", "/readyz")])
        host.stop("enough")
        await running

    swarm.play(story())
    assert found == [(200, "ok\n"), (200, "ok\n"), (200, "ok\n"), (503, "the disk is full?[2J\n")]


def test_the_alerts_ask_only_for_metrics_and_labels_that_there_are() -> None:
    written = yaml.safe_load((ROOT / "deploy/grafana/alerts.yml").read_text())
    rules = [rule for group in written["groups"] for rule in group["rules"]]
    queries = [rule["expr"] for rule in rules]
    named = {name for query in queries for name in re.findall(r"\bdecentral_\w+", query)}
    assert named <= {one.shown_name for one in METRICS}
    labels = {label for query in queries for label in re.findall(r"(\w+)(?:=~|!=|=)\"", query)}
    assert labels <= {"job", "instance", *(label for one in METRICS for label in one.labels)}
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    for rule in rules:
        assert {"alert", "expr", "for", "labels", "annotations"} == set(rule)
        assert rule["labels"]["severity"] in ("critical", "warning")
    beside = yaml.safe_load((ROOT / "deploy/grafana/prometheus.yml").read_text())
    assert all((ROOT / "deploy/grafana" / name).exists() for name in beside["rule_files"])
