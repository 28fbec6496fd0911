"""A server that speaks the Hugging Face hub's protocol, for the hub's own client: files of commits, and commits with LFS.

with hub_server() as hub:
    hub.add("org/name", {"config.json": b"{}"})           # a commit; `hub.files("org/name")` are those of the newest
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"
"""Files that go by LFS."""


@dataclass
class HubServer:
    """Models by name, each a list of commits: number, and files by name."""

    address: str = ""
    models: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    """What was downloaded: method and path."""
    large: dict[str, bytes] = field(default_factory=dict)
    busy: int = 0
    """So many downloads are answered with 503 first."""

    def add(self, name: str, files: dict[str, bytes]) -> str:
        """A commit with these files; its hash."""
        commits = self.models.setdefault(name, [])
        commits.append((hashlib.sha1(f"{name}{len(commits)}".encode()).hexdigest(), files))
        return commits[-1][0]

    def files(self, name: str) -> dict[str, bytes]:
        """Those of the newest commit."""
        return self.models[name][-1][1]

    def at(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """A commit by its hash, or the newest by `main`."""
        commits = self.models[name]
        if revision == "main":
            return commits[-1] if commits else ("0" * 40, {})
        return next((each for each in commits if each[0] == revision), None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def _answer(self, code: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.pop("size", str(len(content))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any, code: int = 200) -> None:
        self._answer(code, json.dumps(value).encode(), Content_Type="application/json")

    def _refuse(self, code: int, error: str, **headers: str) -> None:
        self._answer(code, json.dumps({"error": error}).encode(), X_Error_Code=error, X_Error_Message=error, **headers)

    def do_HEAD(self) -> None:
        self._file()

    def do_GET(self) -> None:
        self._file()

    def _file(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        name, found, rest = path.partition("/resolve/")
        if not found:
            self._refuse(404, "EntryNotFound")
            return
        revision, _, file = rest.partition("/")
        self.hub.asked.append(f"{self.command} {file}")
        if name not in self.hub.models or name in self.hub.private:
            self._refuse(401, "RepoNotFound")
        elif name in self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif (commit := self.hub.at(name, revision)) is None:
            self._refuse(404, "RevisionNotFound")
        elif file not in commit[1]:
            self._refuse(404, "EntryNotFound", X_Repo_Commit=commit[0])
        elif self.command == "GET" and self.hub.busy:
            self.hub.busy -= 1
            self._refuse(503, "busy")
        else:
            content = commit[1][file]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self._answer(200, content, X_Repo_Commit=commit[0], ETag=etag, Accept_Ranges="none")

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.large[hashlib.sha256(content).hexdigest()] = content
        self._answer(200)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.hub.private:
                self._refuse(403, "Forbidden")
                return
            fresh = name not in self.hub.models
            self.hub.models.setdefault(name, [])
            self._json({"url": f"{self.hub.address}/{name}"}, 200 if fresh else 409)
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular"} for each in files
            ]
            self._json({"files": [each | {"shouldIgnore": False} for each in modes]})
        elif path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            objects = [each | {"actions": {"upload": {"href": f"{self.hub.address}/lfs/{each['oid']}"}}} for each in wanted]
            self._json({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._refuse(404, "EntryNotFound")

    def _commit(self, name: str, body: bytes) -> None:
        files = dict(self.hub.files(name)) if self.hub.models[name] else {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        commit = self.hub.add(name, files)
        self._json({"commitUrl": f"{self.hub.address}/{name}/commit/{commit}", "commitOid": commit})


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """The server on a free port of loopback, until the end of the block."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
