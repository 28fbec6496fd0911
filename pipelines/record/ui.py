"""Shows the runs of a storage in MLflow's own pages, on this machine alone, until Ctrl-C.

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

from raystride.pipelines.files import Folder
from raystride.pipelines.record.links import UI_PORT, run_link, runs_link
from raystride.pipelines.record.mlflow_log import (
    ENVIRONMENT,
    MLFLOW_REFERENCE,
    artifact_place,
    database,
    relocate_artifacts,
    schema_lock,
)

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses on loopback without the proxies of the environment, which could not reach them."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit code: 0 after Ctrl-C, 1 where the server did not start, 2 where nothing is to show."""
    parser = argparse.ArgumentParser(prog="raystride ui", description="Shows a storage's runs in MLflow.")
    parser.add_argument("--storage", default="runs", help="folder that the runs lie in")
    parser.add_argument("--port", type=int, default=UI_PORT, help="port on loopback")
    given = parser.parse_args(arguments)
    storage = Folder.at(given.storage)
    if storage.local is None or not storage.exists("mlflow.db"):
        print(f"--storage is {storage}: there is no mlflow.db in it. Name a local folder with runs", file=sys.stderr)
        return 2
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with schema_lock(database(storage)):
        relocate_artifacts(database(storage))
    if is_listening(given.port):
        print(f"--port is {given.port}: another program listens there; give another --port", file=sys.stderr)
        return 1
    server = start_server(database(storage), given.port)
    try:
        if not await_server(server, given.port, ended):
            if ended.is_set():
                return 0
            code = server.poll()
            how = f"ended with code {code}" if code is not None else f"gave no answer within {START_TIMEOUT_S:.0f} s"
            print(
                f"MLflow's server on port {given.port} {how}; `mlflow server --port {given.port}` says more", file=sys.stderr
            )
            return 1
        print(newest_run(storage, given.port), flush=True)
        while not ended.wait(0.5):
            if server.poll() is not None:
                print("MLflow ended by itself", file=sys.stderr)
                return 1
        return 0
    finally:
        stop_server(server)


def start_server(uri: str, port: int) -> "subprocess.Popen[bytes]":
    """Starts MLflow's server over a database, on loopback, in a session of its own: it leaves children otherwise."""
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
    command += ["--workers", "1", "--default-artifact-root", artifact_place(uri) or "mlartifacts"]
    # Its job runner would start nine processes of 230 MB for features that runs have no use for.
    environment = os.environ | ENVIRONMENT | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    quiet = subprocess.DEVNULL  # the server says much of itself, and nothing that helps here
    return subprocess.Popen(command, env=environment, start_new_session=True, stdout=quiet, stderr=quiet)


def is_listening(port: int) -> bool:
    """Returns whether a program listens on a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def await_server(server: "subprocess.Popen[bytes]", port: int, ended: threading.Event) -> bool:
    """Waits until the server answers; False where it died, took too long or `ended` was set."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None and not ended.wait(0.25):
        try:
            with DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=2):
                # Whatever answers may be another program on that port, on which ours has just died.
                return not ended.wait(0.25) and server.poll() is None
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


def newest_run(storage: Folder, port: int) -> str:
    """Lines that name the run recorded last with its page, and the table of all."""
    references = []
    for run in storage.names():
        path = (storage / run).local
        if path and (path / MLFLOW_REFERENCE).exists():
            references.append(((path / MLFLOW_REFERENCE).stat().st_mtime, run))
    if not references:
        return f"MLflow shows the runs: http://127.0.0.1:{port}"
    run = max(references)[1]
    reference = (storage / run).read_json(MLFLOW_REFERENCE)
    return f"MLflow shows the newest run, {run}: {run_link(reference, port)}\nand all runs: {runs_link(reference, port)}"


if __name__ == "__main__":
    sys.exit(main())
