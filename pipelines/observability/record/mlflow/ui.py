"""Serves the MLflow UI for a storage's runs on loopback until Ctrl-C (`raystride ui`).

raystride ui --storage runs --port 5000
# MLflow shows the newest run, gpt2-1f3a: http://127.0.0.1:5000/#/experiments/1/runs/9c...
# and all runs: http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=raystride...
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from raystride.pipelines.observability.record.mlflow.database import (
    artifact_root,
    database_uri,
    relocate_artifacts,
    schema_lock,
)
from raystride.pipelines.observability.record.mlflow.links import UI_PORT, run_link, runs_link
from raystride.pipelines.observability.record.mlflow.log import ENVIRONMENT, MLFLOW_REFERENCE, load_mlflow, read_reference
from raystride.pipelines.observability.record.mlflow.schema import ensure_schema
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
LOOPBACK_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs on loopback without the environment's proxies, which could not reach them."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns 0 after Ctrl-C, 1 if the server did not start, 2 if the storage has no runs in MLflow."""
    parser = argparse.ArgumentParser(prog="raystride ui", description="Shows a storage's runs in MLflow.")
    parser.add_argument("--storage", default="runs", help="folder that the runs lie in")
    parser.add_argument("--port", type=int, default=UI_PORT, help="port on loopback")
    given = parser.parse_args(arguments)
    storage = Folder.from_uri(given.storage)
    if storage.local is None or not storage.exists("mlflow.db"):
        print(f"--storage is {storage}: there is no mlflow.db in it. Name a local folder with runs", file=sys.stderr)
        return 2
    stop_requested = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop_requested.set())
    load_mlflow()
    with schema_lock(database_uri(storage)):
        ensure_schema(database_uri(storage), print_warning)
        relocate_artifacts(database_uri(storage))
    if is_listening(given.port):
        print(f"--port is {given.port}: another program listens there; give another --port", file=sys.stderr)
        return 1
    server = start_server(database_uri(storage), given.port)
    try:
        if not await_server(server, given.port, stop_requested):
            if stop_requested.is_set():
                return 0
            code = server.poll()
            outcome = f"ended with code {code}" if code is not None else f"gave no answer within {START_TIMEOUT_S:.0f} s"
            print(
                f"MLflow's server on port {given.port} {outcome}; `mlflow server --port {given.port}` says more",
                file=sys.stderr,
            )
            return 1
        print(describe_newest_run(storage, given.port), flush=True)
        while not stop_requested.wait(0.5):
            if server.poll() is not None:
                print("MLflow ended by itself", file=sys.stderr)
                return 1
        return 0
    finally:
        stop_server(server)


def start_server(uri: str, port: int) -> "subprocess.Popen[bytes]":
    """Starts MLflow's server for a database, on loopback, in its own session, so that its children can be ended too."""
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        uri,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--workers", "1", "--default-artifact-root", artifact_root(uri) or "mlartifacts"]
    # Its job runner would start nine processes of 230 MB each for features that runs do not use.
    environment = os.environ | ENVIRONMENT | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONSAFEPATH": "1"}
    quiet = subprocess.DEVNULL  # the server prints much, and nothing useful here
    return subprocess.Popen(command, env=environment, start_new_session=True, stdout=quiet, stderr=quiet)


def is_listening(port: int) -> bool:
    """Returns whether a program listens on a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def await_server(server: "subprocess.Popen[bytes]", port: int, stop_requested: threading.Event) -> bool:
    """Waits until the server answers; returns False if it died, timed out, or `stop_requested` was set."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None and not stop_requested.wait(0.25):
        try:
            with LOOPBACK_OPENER.open(f"http://127.0.0.1:{port}/health", timeout=2):
                # The answer may come from another program on that port, because of which this server has just died.
                return not stop_requested.wait(0.25) and server.poll() is None
        except (urllib.error.URLError, OSError):
            continue
    return False


def stop_server(server: "subprocess.Popen[bytes]") -> None:
    """Ends the server and all its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
    server.wait()


def describe_newest_run(storage: Folder, port: int) -> str:
    """Returns lines with the link of the newest run's page, and of the table of all runs."""
    references = []
    for run in storage.names():
        path = (storage / run).local
        if path and (path / MLFLOW_REFERENCE).exists():
            references.append(((path / MLFLOW_REFERENCE).stat().st_mtime, run))
    if not references:
        return f"MLflow shows the runs: http://127.0.0.1:{port}"
    run = max(references)[1]
    try:
        reference = read_reference(storage / run)
    except SealBroken as error:
        return f"MLflow shows the runs: http://127.0.0.1:{port}\nwarning: {error}"
    return f"MLflow shows the newest run, {run}: {run_link(reference, port)}\nand all runs: {runs_link(reference, port)}"


if __name__ == "__main__":
    sys.exit(main())
