"""A server that speaks S3, and a proxy in front of it that breaks requests as a seeded random number generator says.

with server() as store, Proxy(store, seed=1, faults=Faults(unavailable=0.1)) as proxy:
    Folder.from_uri(proxy.uri("runs")).put("a", b"...")
    proxy.requests                                        # Counter({"PUT": 1})
"""

import http.client
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from tests.ports import hold_port
from tests.waiting import wait_until

KEYS = {"AWS_ACCESS_KEY_ID": "AKIARAYSTRIDETESTS", "AWS_SECRET_ACCESS_KEY": "of-no-use-anywhere-else"}
BUCKET = "bucket"
STALL_S = 4.5
"""Longer than pyarrow's client waits for a byte."""
_UNAVAILABLE = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@contextmanager
def server(on_disk: Path | None = None) -> Iterator[str]:
    """The endpoint of a server with an empty bucket; credentials for it stand in the environment.

    moto's, which keeps all in memory and believes every signature; with a folder rclone's, which keeps it there and checks.
    """
    holder = ExitStack()
    port = holder.enter_context(hold_port())
    if on_disk:
        (on_disk / BUCKET).mkdir()
        keys = ",".join(KEYS.values())
        command = [str(Path(sys.executable).parent / "rclone"), "serve", "s3", "--auth-key", keys]
        command += ["--addr", f"127.0.0.1:{port}", "--dir-cache-time", "0s", str(on_disk)]
    else:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept = {name: os.environ.get(name) for name in (*KEYS, "AWS_EC2_METADATA_DISABLED")}
    os.environ.update(KEYS, AWS_EC2_METADATA_DISABLED="true")
    try:
        make_bucket(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        holder.close()
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def make_bucket(port: int, process: "subprocess.Popen[bytes]", host: str = "127.0.0.1") -> None:
    """Waits for the server and makes the bucket."""

    def answer() -> int:
        assert process.poll() is None, "the server ended"
        try:
            return ask(host, port, "PUT", f"/{BUCKET}", b"", {})[0]
        except OSError:
            return 0

    assert wait_until(answer, "the server") < 500  # one that asks for signatures refuses, and has its bucket


def ask(host: str, port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """One request; status and body of its answer."""
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def uri(endpoint: str, path: str) -> str:
    """The address of a path in the bucket of a server, with all that it takes to reach it."""
    return f"s3://{BUCKET}/{path}?endpoint_override={endpoint}&scheme=http&region=us-east-1"


@dataclass(frozen=True)
class Faults:
    """Shares of the requests that are answered badly."""

    unavailable: float = 0.0
    """503, before the server hears of it."""
    reset: float = 0.0
    """The connection breaks before the server hears of it."""
    lost: float = 0.0
    """The server does what it was asked for, and its answer is lost."""
    truncated: float = 0.0
    """The answer ends in the middle."""
    stalled: float = 0.0
    """The answer does not come for longer than anybody waits."""
    only: str = ""
    """A word that paths have whose requests are broken; empty: all."""


class Proxy:
    """In front of a server: counts requests, and breaks some of them."""

    def __init__(self, endpoint: str, seed: int = 0, faults: Faults | None = None) -> None:
        self.target = endpoint.removeprefix("http://")
        self.faults = faults or Faults()
        self.requests: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self._random, self._lock = random.Random(seed), threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def uri(self, path: str) -> str:
        """The address of a path, through this proxy."""
        return uri(self.endpoint, path)

    def fault(self, method: str, path: str) -> str:
        """What becomes of this request: the name of a fault, or nothing."""
        with self._lock:
            self.requests[method] += 1
            drawn = self._random.random()
            for name in ("unavailable", "reset", "lost", "truncated", "stalled"):
                share = getattr(self.faults, name)
                if drawn < share and self.faults.only in path:
                    self.broken[name] += 1
                    return name
                drawn -= share
        return ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one packet: two wait for each other, 40 ms
    proxy: Proxy

    def _serve(self) -> None:
        body = self._body()
        fault = self.proxy.fault(self.command, self.path)
        if fault == "unavailable":
            self._answer(503, {"Content-Type": "application/xml"}, _UNAVAILABLE)
            return
        if fault == "reset":
            self._break()
            return
        host, _, port = self.proxy.target.partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in ("transfer-encoding", "expect")
        }
        connection.request(self.command, self.path, body=body, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if fault == "lost":
            self._break()
            return
        if fault == "stalled":
            time.sleep(STALL_S)
        skipped = ("transfer-encoding", "connection", "content-length")
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in skipped}
        if self.command == "HEAD":
            kept["Content-Length"] = answer.getheader("Content-Length", "0")
        self._answer(answer.status, kept, content, cut=fault == "truncated")

    def handle_expect_100(self) -> bool:
        """Says at once that the body may come; whoever sends it waits for a second otherwise."""
        ready = super().handle_expect_100()
        self.wfile.flush()
        return ready

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            whole = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                whole += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return whole
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        try:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers and status != 204:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self._break()
        except OSError:
            self.close_connection = True  # whoever asked has given up

    def _break(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):
            self.close_connection = True

    def finish(self) -> None:
        with suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *arguments: Any) -> None:
        """Nothing: what is broken here is broken on purpose."""

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve
