"""The page's connections: each has its time, one network has its share, and what nobody reads is dropped."""

import asyncio
import logging
import resource
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from decentral.view.page import connections
from decentral.view.page.connections import HEADER_S, MOST_CONNECTIONS, PARSED_BYTES, UNREAD_S, BoundedConnection
from tests.view.page.played_page import Page

GET = b"GET /api/swarm HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"


def play(story: Callable[[Page], Coroutine[Any, Any, None]]) -> None:
    async def played() -> None:
        await story(Page())

    asyncio.run(played())


def test_a_request_that_is_half_sent_is_dropped_in_time_however_slowly_it_goes_on() -> None:
    async def story(page: Page) -> None:
        wire, silent = page.connect(), page.connect()
        page.send(wire, b"GET / HTTP/1.1\r\n")
        for _ in range(4):
            page.timers.pass_(HEADER_S / 5)
            page.send(wire, b"a: b\r\n")
        assert not wire.closed
        page.timers.pass_(HEADER_S / 5)
        assert wire.closed
        assert silent.closed
        assert page.state.connections == set()

    play(story)


def test_a_connection_is_kept_for_further_requests_but_each_has_to_arrive_in_time() -> None:
    async def story(page: Page) -> None:
        wire = page.connect()
        for number in range(1, 9):
            page.timers.pass_(HEADER_S / 4)
            assert not wire.closed
            page.send(wire, GET)
            await page.until(lambda number=number: wire.sent.count(b"HTTP/1.1 200") == number)  # type: ignore[misc]
        page.send(wire, GET[:20])
        page.timers.pass_(HEADER_S)
        assert wire.closed

    play(story)


def test_a_stream_stays_open_while_its_reader_reads() -> None:
    async def story(page: Page) -> None:
        wire = page.connect()
        page.send(wire, GET.replace(b"/api/swarm", b"/stream"))
        await page.until(lambda: b"everything" in wire.sent)
        page.timers.pass_(1e6)
        page.updates.publish()
        await page.until(lambda: b"changes" in wire.sent)
        assert not wire.closed
        wire.abort()
        await page.until(lambda: not page.updates.browsers)

    play(story)


def test_streams_that_nobody_reads_are_dropped_and_free_their_places() -> None:
    async def story(page: Page) -> None:
        wires = [page.connect(reads=False) for _ in range(32)]
        for wire in wires:
            page.send(wire, GET.replace(b"/api/swarm", b"/stream"))
        await page.until(lambda: len(page.updates.browsers) == len(wires))
        await page.until(lambda: all(wire.sent for wire in wires))
        page.timers.pass_(UNREAD_S)
        assert all(wire.closed for wire in wires)
        await page.until(lambda: not page.updates.browsers)

    play(story)


def test_an_answer_that_nobody_reads_does_not_keep_its_connection_open() -> None:
    async def story(page: Page) -> None:
        wire = page.connect(reads=False)
        page.send(wire, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        await page.until(lambda: bool(wire.sent))
        page.timers.pass_(UNREAD_S)
        assert wire.closed
        await page.until(lambda: not page.state.tasks)

    play(story)


def test_half_sent_requests_of_one_network_leave_the_other_half_free() -> None:
    async def story(page: Page) -> None:
        wires = [page.connect() for _ in range(1100)]
        assert sum(not wire.closed for wire in wires) == MOST_CONNECTIONS // 2
        assert not page.connect("10.0.0.2").closed

    play(story)


def test_all_networks_of_a_customer_with_ipv6_share_one_half() -> None:
    async def story(page: Page) -> None:
        wires = [page.connect(f"2001:db8:1:{number:x}::1") for number in range(MOST_CONNECTIONS)]
        assert sum(not wire.closed for wire in wires) == MOST_CONNECTIONS // 2
        assert not page.connect("2001:db8:2::1").closed

    play(story)


@pytest.mark.parametrize(("files", "most"), [(256, 64), (1024, 128), (1 << 20, 128), (resource.RLIM_INFINITY, 128)])
def test_connections_use_half_of_the_files_that_the_process_may_open_at_most(
    monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: {resource.RLIMIT_NOFILE: (files, files)}[which])
    assert connections.most_connections() == most


def test_bytes_that_are_not_http_during_an_answer_end_the_connection() -> None:
    async def story(page: Page) -> None:
        wire = page.connect()
        page.send(wire, POST.replace(b"POST /", b"POST /stream"))
        await page.until(lambda: b"HTTP/1.1 405" in wire.sent)
        page.send(wire, b"nonsense\r\n")
        assert wire.closed

    play(story)


def test_bytes_that_are_not_http_before_an_answer_end_the_connection_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each such request wrote a traceback to the terminal."""

    async def story(page: Page) -> None:
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        wire = page.connect()
        wire.tells_later = True  # as a socket does: the application has its turn before
        page.send(wire, POST + b"zz\r\n")
        assert wire.closed
        await page.until(lambda: not page.state.tasks)

    play(story)
    assert caplog.messages == []


def test_a_caller_gives_others_a_turn_after_a_few_bytes() -> None:
    async def story(page: Page) -> None:
        assert issubclass(BoundedConnection, asyncio.BufferedProtocol)  # so that the event loop asks for the buffer
        wire = page.connect()
        assert wire.protocol is not None
        assert len(wire.protocol.get_buffer(1 << 20)) == PARSED_BYTES

    play(story)
