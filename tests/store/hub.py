"""A stand-in for the Hugging Face Hub on loopback: what pushing to a repository and reading from it ask of it.

It answers as the Hub does, as far as huggingface_hub 1 and 2 look at the answers. A commit takes effect in one step.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

LFS_FROM_BYTES = 1000


@dataclass
class Hub:
    """The repositories, each with its files, and the contents that were sent, by their digests."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)  # digests of the contents in the order of their arrival
    breaks_after: int | None = None  # so many contents arrive; then every request fails
    url: str = ""


class Answers(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.answer(b"")

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("content-length", 0))))

    def do_PUT(self) -> None:
        hub, data = self.hub, self.rfile.read(int(self.headers.get("content-length", 0)))
        if hub.breaks_after is not None and len(hub.received) >= hub.breaks_after:
            self.send(403, {"error": "broken"})
            return
        oid = hashlib.sha256(data).hexdigest()
        hub.contents[oid] = data
        hub.received.append(oid)
        self.send(200, {})

    def answer(self, body: bytes) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            self.send(200, {"errors": [], "warnings": []})
            return
        if path == "/api/repos/create":
            name = "/".join(filter(None, (json.loads(body).get("organization"), json.loads(body)["name"])))
            name = name if "/" in name else f"me/{name}"
            known = name in self.hub.repositories
            self.hub.repositories.setdefault(name, {})
            self.send(409 if known else 200, {"url": f"{self.hub.url}/{name}", "name": name})
            return
        if found := re.fullmatch(r"/(.+?)\.git/info/lfs/objects/batch", path):
            self.send(200, {"transfer": "basic", "objects": [self.wanted(one) for one in json.loads(body)["objects"]]})
            return
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self.file(found[1], found[2])
            return
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([a-z-]+)(?:/([^/]+))?(?:/(.+))?)?", path)
        if found is None or found[1] not in self.hub.repositories:
            self.send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        self.of_repository(self.hub.repositories[found[1]], found[2] or "", found[4] or "", body)

    def of_repository(self, files: dict[str, bytes], what: str, path: str, body: bytes) -> None:
        match what:
            case "" | "revision":
                self.send(200, {"id": "me/x", "sha": "0" * 40, "siblings": [], "private": True, "tags": []})
            case "preupload":
                listed = json.loads(body)["files"]
                modes = ["lfs" if one["size"] >= LFS_FROM_BYTES else "regular" for one in listed]
                named = zip(listed, modes, strict=True)
                answers = [{"path": one["path"], "uploadMode": mode, "shouldIgnore": False} for one, mode in named]
                self.send(200, {"files": answers})
            case "commit":
                for line in map(json.loads, body.splitlines()):
                    self.apply(files, line["key"], line["value"])
                self.send(
                    200, {"commitUrl": f"{self.hub.url}/me/x/commit/{'1' * 40}", "commitOid": "1" * 40, "success": True}
                )
            case "tree":
                found = list(entries(files, path))
                code = {} if found or not path else {"X-Error-Code": "EntryNotFound"}
                self.send(404 if code else 200, {"error": "Entry not found"} if code else found, code)
            case _:
                paths = [one for asked in json.loads(body)["paths"] for one in entries(files, asked.rpartition("/")[0])]
                self.send(200, [one for one in paths if one["path"] in json.loads(body)["paths"]])

    def apply(self, files: dict[str, bytes], key: str, value: dict[str, Any]) -> None:
        match key:
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                files[value["path"]] = self.hub.contents[value["oid"]]
            case "deletedFile":
                del files[value["path"]]
            case "deletedFolder":
                for name in [name for name in files if name.startswith(value["path"].rstrip("/") + "/")]:
                    del files[name]

    def wanted(self, one: dict[str, Any]) -> dict[str, Any]:
        if one["oid"] in self.hub.contents:
            return one
        return {**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}", "header": {}}}}

    def file(self, repository: str, name: str) -> None:
        content = self.hub.repositories.get(repository, {}).get(name)
        if content is None:
            self.send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        part = content[int(asked[1]) : int(asked[2]) + 1] if asked else content
        self.send_response(206 if asked else 200)
        self.send_header("content-length", str(len(part)))
        self.send_header("etag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("x-repo-commit", "1" * 40)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(part)

    def send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "content-type": "application/json",
            "content-length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def entries(files: dict[str, bytes], folder: str) -> Iterator[dict[str, Any]]:
    """What is directly in a folder of a repository, as the Hub lists it."""
    start = f"{folder}/" if folder else ""
    seen = set[str]()
    for name, content in sorted(files.items()):
        if name.startswith(start):
            first, is_deeper, _ = name.removeprefix(start).partition("/")
            if first not in seen:
                seen.add(first)
                kind = "directory" if is_deeper else "file"
                yield {"type": kind, "path": start + first, "size": 0 if is_deeper else len(content), "oid": "0" * 40}


@contextmanager
def hub_running() -> Iterator[Hub]:
    """Serve an empty Hub on loopback until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Answers,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
