"""Runs `raystride` with this file's words on the cluster's head, and shows what it prints.

    docker compose run --rm job train --config lm_python

Waits for the head first, and for workers until no more of them come.
"""

import json
import os
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HEAD = "http://head:8265"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this network without the proxies of the environment, which could not reach them."""
WAIT_S = 300
"""For the head and the first worker."""
SETTLED_S = 5
"""No worker has come for so long: that is all of them."""


def workers() -> int:
    """How many nodes there are besides the head; -1 while it does not answer. Raises HTTPError where it refuses us."""
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    address = f"{HEAD}/nodes?view=summary"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    try:
        with DIRECT.open(request, timeout=5) as answer:
            nodes: list[dict[str, dict[str, str]]] = json.load(answer)["data"]["summary"]
    except urllib.error.HTTPError as error:
        if error.code < 500:
            raise
        return -1
    except OSError:
        return -1
    return sum(node["raylet"].get("state") == "ALIVE" for node in nodes) - 1


def wait() -> None:
    """Until the workers are there."""
    end, found, since = time.monotonic() + WAIT_S, 0, time.monotonic()
    while found < 1 or time.monotonic() - since < SETTLED_S:
        if time.monotonic() > end:
            sys.exit("no head, or no worker, has come: docker compose ps; docker compose logs head worker")
        time.sleep(0.5)
        if (now := workers()) != found:
            found, since = now, time.monotonic()


def main(words: list[str]) -> None:
    """Becomes `ray job submit`."""
    wait()
    if words[:1] in (["train"], ["sweep"]):
        words[1:1] = ["--record.mlflow_uri", os.environ["RAYSTRIDE_MLFLOW"]]
    folder = tempfile.mkdtemp()
    shutil.copy("/job/settings.yaml", folder)
    variables = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": os.environ["RAYSTRIDE_GRACE_S"]}})
    command = ["ray", "job", "submit", "--address", HEAD, "--working-dir", folder, "--runtime-env-json", variables]
    os.execvp("ray", [*command, "--", "raystride", *words])  # noqa: S606


main(sys.argv[1:])
