"""Requests to the HTTP servers of a peer, in bytes: whole ones, nearly whole ones, and what is no HTTP at all.

`Clients.visit` says what one connection sends, in which pieces, and how it ends. A request is right first; chance then
changes its line, its headers, its body or its bytes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Target = Literal["page", "metrics", "model"]
TARGETS: tuple[Target, ...] = ("page", "metrics", "model")
Ending = Literal["reads", "leaves", "half-sent", "unread"]
MODEL = "words-3fa2c1"
FIELD = [b"a: " + b"x" * 60] * 300  # many headers
HUGE = 70_000  # bytes of a header, more than any server reads
PATHS: dict[Target, tuple[str, ...]] = {
    "page": ("/", "/api/swarm", "/api/swarm", "/api/peers/0", "/api/peers/1", "/static/main.js", "/static/icon.svg"),
    "metrics": ("/metrics", "/metrics", "/", "/metrics?name[]=decentral_tokens_total", "/favicon.ico"),
    "model": ("/v1/models", "/v1/completions", "/v1/completions", "/v1/chat/completions"),
}
ODD_PATHS = (
    "/stream", "/api/peers/99999999999", "/api/peers/-1", "/api/peers/%00", "/api/peers/" + "9" * 5000, "/static/",
    "/static/../server.py", "/static/%2e%2e/%2e%2e/server.py", "/static/..%5c..%5cserver.py", "/static//etc/passwd",
    "/v1/models/" + MODEL, "/v1/embeddings", "/v1/../api/swarm", "*", "http://evil.example/", "//", "/%ff%fe",
    "/?" + "a=b&" * 9,
    "/metrics?name[]=" + "x" * 9000, "/metrics?name[]=%ff&name[]=", "/" + "a" * 50_000, "/" + "a/" * 20_000, "",
)  # fmt: skip
ODD_METHODS = ("POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "PRI", "get", "G\tT", "\0", "X" * 500)
ODD_VERSIONS = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.9", "HTTP/1.1 ", "HTTX/1.1", "", "HTTP/" + "1" * 300)
ODD_HEADERS = (
    b"Host: evil.example", b"Host: 127.0.0.1.evil.example", b"Host: [::1", b"Host: \xff\xfe", b"Host:",
    b"Host: ]:99", b"Host: [127.0.0.1",
    b"Host: [[::1]]:1", b"Host: 127.0.0.1:x",
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: +5", b"Content-Length: 99999999999999999999999",
    b"Content-Length: 5, 6", b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: gzip", b"Transfer-Encoding: identity", b"Expect: 100-continue", b"Expect: \x80",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: " + b"A" * 22 + b"==",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Origin: http://evil.example", b"Origin: http://[", b"Origin: null", b"Content-Type: text/plain", b"Content-Type:",
    b"Range: bytes=0-0,2-2,-9", b"Range: bytes=99999999999-", b'If-None-Match: "x"', b"If-Modified-Since: yesterday",
    b"If-Range: x\r\nRange: bytes=5-1", b"Accept-Encoding: gzip",
    b"Accept: application/openmetrics-text; version=1.0.0",
    b"Accept: " + b"a/b;q=x," * 2000, b"Cookie: " + b"a=" * 20_000, b" folded: x", b"no colon", b": empty", b"a\0b: c",
    b"x: \0", b"X" * HUGE + b": x", b"x: " + b"y" * HUGE, b"\r\n".join(FIELD), b"Connection: close", b"Proxy: x",
)  # fmt: skip
ODD_CHUNKS = (
    b"5\r\nhello\r\n0\r\n\r\n", b"5;a=b\r\nhello\r\n0\r\nTrailer: x\r\n\r\n", b"ffffffffffffffff\r\nx", b"-1\r\nx\r\n",
    b"zz\r\n", b"5\r\nhel", b"0" * 5000 + b"5\r\nhello\r\n", b"1\r\nx\r\n" * 3000 + b"0\r\n\r\n",
    b"5 \r\nhello\r\n0\r\n\r\n",
)  # fmt: skip
NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 60, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 50,
    b"\0" * 200,
    b"GET /\r\n", b"GET / HTTP/1.1\n\n", b"/multistream/1.0.0\n", b"SSH-2.0-x\r\n", b"\n" * 3000, b" " * 70_000,
)  # fmt: skip
DEEP, MANY = 100_000, 300_000  # levels of JSON, and tokens in a list


@dataclass(frozen=True, slots=True)
class Visit:
    """What one connection sends, and how it ends. `whole`: its requests are all right, and get an answer each."""

    pieces: tuple[bytes, ...]
    requests: int
    ending: Ending
    whole: bool


class Clients:
    """All who connect to one server."""

    def __init__(self, chance: Random, target: Target) -> None:
        self.chance, self.target = chance, target

    def visit(self) -> Visit:
        drawn = self.chance.random()
        count = self.chance.choice((1, 2, 5, 20)) if self.target != "metrics" else 1
        right = [self.chance.random() < 0.7 for _ in range(count)]
        requests = [self.request(one, number == count - 1) for number, one in enumerate(right)]
        data, ending = b"".join(requests), "reads"
        if drawn < 0.05:
            data, ending = data[: self.chance.randint(0, len(data))], "half-sent"
        elif drawn < 0.12:
            ending = self.chance.choice(("leaves", "unread"))
        if b" /stream " in data:
            ending = "unread" if ending == "unread" else "leaves"
        return Visit(self._pieces(data), count, ending, all(right) and ending == "reads")  # type: ignore[arg-type]

    def _pieces(self, data: bytes) -> tuple[bytes, ...]:
        """The bytes as they are sent: at once, or split somewhere."""
        if self.chance.random() < 0.8 or len(data) < 2:
            return (data,)
        cuts = sorted(self.chance.randrange(len(data)) for _ in range(self.chance.choice((1, 1, 2, 6))))
        ends = zip([0, *cuts], [*cuts, len(data)], strict=True)
        return tuple(data[begin:end] for begin, end in ends)

    def request(self, right: bool, last: bool) -> bytes:
        """One request; the last one of a connection asks to close it."""
        path = self.chance.choice(PATHS[self.target])
        method = "POST" if path.endswith("completions") else "GET"
        body = self._body(path, right) if method == "POST" else b""
        line, version = [method, path], "HTTP/1.1"
        headers = [b"Host: 127.0.0.1:8420"] + [b"Connection: close"] * last
        if method == "POST":
            headers += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
        if not right:
            match self.chance.randrange(8 if method == "GET" else 12):
                case 0:
                    line[0] = self.chance.choice(ODD_METHODS)
                case 1:
                    line[1] = self.chance.choice(ODD_PATHS)
                case 2:
                    version = self.chance.choice(ODD_VERSIONS)
                case 3 | 4:
                    headers.append(self.chance.choice(ODD_HEADERS))
                case 5:
                    self.chance.shuffle(headers)
                    headers[0] = self.chance.choice(ODD_HEADERS)
                case 6:
                    headers = [b"Host: 127.0.0.1", b"Content-Type: application/json", b"Transfer-Encoding: chunked"]
                    body = self.chance.choice(ODD_CHUNKS)
                case 7:
                    return self._no_http(b"\r\n".join([" ".join(line).encode(), *headers, b"", body]))
        return b"\r\n".join([" ".join([*line, version]).encode("latin-1"), *headers, b"", body])

    def _no_http(self, data: bytes) -> bytes:
        at = self.chance.randrange(len(data))
        turned = bytes([self.chance.randrange(256)])
        noise = self.chance.randbytes(self.chance.choice((1, 50, 5000)))
        return self.chance.choice((*NO_HTTP, noise, data[:at] + turned + data[at + 1 :], data[:at] + data[at // 2 :]))

    # Bodies of requests to the model

    def _body(self, path: str, right: bool) -> bytes:
        chance = self.chance
        fields: dict[str, Any] = {"model": MODEL, "max_tokens": chance.choice((1, 1, 2)), "seed": chance.randrange(99)}
        if path.endswith("chat/completions"):
            fields["messages"] = [{"role": "user", "content": chance.choice(("hi", "é", "<|im_end|>", ""))}]
        else:
            fields["prompt"] = chance.choice(("the swarm", "\0", "x" * 50, [1, 2, 255]))
        if chance.random() < 0.3:
            fields["stream"] = True
        if right:
            return json.dumps(fields).encode()
        lies = self.chance.choice(self._lies)
        return lies(self, fields)

    def _other_value(self, fields: dict[str, Any]) -> bytes:
        values: tuple[object, ...] = (
            None, True, -1, 1 << 70, 10**400, 1.5, float("nan"), float("inf"), "", "x" * 100_000, [], {}, [[]], [256],
            [-1], [1 << 40], [1] * 5000, ["a", 1], [{}] * 2000, [{"role": "user", "content": []}], "\ud800", "gpt-4",
            {"a": 1}, [{"role": "tool", "content": "x"}],
            [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1500}],
        )  # fmt: skip
        names = ("temperature", "top_p", "stop", "n", "logit_bias", "stream_options", "tools", "echo", "user", *fields)
        fields[self.chance.choice(names)] = self.chance.choice(values)
        return json.dumps(fields).encode()

    def _deep(self, fields: dict[str, Any]) -> bytes:
        opened, closed = self.chance.choice((("[", "]"), ('{"a":', "}")))
        depth = self.chance.choice((100, 2000, DEEP))
        inside = opened * depth + "1" + closed * depth * self.chance.randrange(2)
        return self.chance.choice((inside, f'{{"model": "x", "prompt": {inside}}}')).encode()

    def _many(self, fields: dict[str, Any]) -> bytes:
        many = self.chance.choice((1000, 30_000, MANY if self.chance.random() < 0.1 else 40_000))
        token = self.chance.choice(("1", "-1", "1.5", '"a"', "[]", "1e999", "null"))
        return f'{{"model": "{MODEL}", "prompt": [{",".join([token] * many)}]}}'.encode()

    def _numbers(self, fields: dict[str, Any]) -> bytes:
        number = self.chance.choice(("9" * 5000, "1e99999", "-0", "0" * 50, "1" * 100_000, "NaN", "-Infinity", "0x1"))
        return f'{{"model": "{MODEL}", "prompt": "x", "seed": {number}}}'.encode()

    def _text(self, fields: dict[str, Any]) -> bytes:
        plain = json.dumps(fields).encode()
        at = self.chance.randrange(len(plain))
        long = b'{"model": "' + b"x" * self.chance.choice((5000, 1_100_000 if self.chance.random() < 0.1 else 9000))
        return self.chance.choice(
            (b"", b"\xff" * 50, b"\xef\xbb\xbf" + plain, plain[:at], plain + plain, long, b'"' * 999)
        )

    _lies: tuple[Callable[["Clients", dict[str, Any]], bytes], ...] = (
        _other_value, _other_value, _other_value, _deep, _many, _numbers, _text,
    )  # fmt: skip
