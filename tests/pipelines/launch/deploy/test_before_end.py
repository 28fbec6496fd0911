"""Before a Ray pod ends, jobs save and the workers wait for that."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from raystride.pipelines.launch.deploy import before_end
from raystride.pipelines.launch.deploy.own_ray import reserve_ports
from tests.tiny import write_text
from tests.waiting import LIMIT_S, wait_until


def test_a_worker_waits_for_the_working_processes_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_end, "POLL_S", 0.05)
    names = (*before_end.IDLE_PREFIXES, "ray::RayTrainWorker")
    started = [
        subprocess.Popen(["bash", "-c", f"exec -a {name} cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for name in names
    ]
    processes = [psutil.Process(process.pid) for process in started]
    monkeypatch.setattr(before_end.psutil, "process_iter", lambda: processes)
    try:
        for process, name in zip(processes, names, strict=True):
            wait_until(lambda process=process, name=name: process.cmdline()[:1] == [name], name)
        assert not before_end.wait_for_workers(0.1)
        assert started[-1].stdin is not None
        started[-1].stdin.close()  # it ends
        assert before_end.wait_for_workers(LIMIT_S)
    finally:
        for child in started:
            child.kill()
            child.wait()


@pytest.mark.long
@pytest.mark.weekly
def test_the_head_makes_a_job_save_before_it_ends(tmp_path: Path) -> None:
    folder = tempfile.mkdtemp(prefix="rs-", dir="/tmp")  # short: Ray's sockets lie below it
    with reserve_ports(3) as (port, dashboard, agent):
        address = f"http://127.0.0.1:{dashboard}"
        # Another process reads them: Ray looks once, when it is first imported.
        environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        environment["PATH"] = f"{sys.prefix}/bin:{environment['PATH']}"
        options = f"--head --block --port={port} --dashboard-port={dashboard} --dashboard-agent-listen-port={agent}"
        options += f" --num-cpus=2 --temp-dir={folder} --disable-usage-stats"
        with (tmp_path / "ray.log").open("w") as log:
            head = subprocess.Popen(["ray", "start", *options.split()], env=environment, stdout=log, stderr=log)

        def request_json(path: str, **body: object) -> Any:
            request = Request(f"{address}/api/jobs/{path}", headers={"Authorization": f"Bearer {'0' * 64}"})
            if body:
                request.data = json.dumps(body).encode()
            with urlopen(request, timeout=30) as answer:
                return json.load(answer)

        def answered(path: str) -> Any:
            """The answer, or None while there is no dashboard or it is too busy."""
            try:
                return request_json(path)
            except HTTPError as error:
                if error.code < 500:
                    raise
            except OSError:
                pass
            return None

        try:
            wait_until(lambda: answered("") == [], "an answer of Ray's head", head, pause_s=0.5)
            flags = f"--data.source {write_text(tmp_path)} --train.steps 1000000 --run mine --storage {tmp_path}"
            flags += " --scaling.workers 1 --train.slots 4 --train.slot_size 2 --data.validation tail --validation.every 0"
            flags += " --record.mlflow false --model.layers 1 --model.hidden_size 16 --model.heads 2"
            command = f"raystride train --config lm_characters {flags}"
            job = request_json("", entrypoint=command, runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})[
                "submission_id"
            ]

            def has_stepped() -> bool:
                job_log, state = answered(f"{job}/logs"), answered(job)
                assert state is None or state["status"] in ("PENDING", "RUNNING"), job_log
                return job_log is not None and "step " in job_log["logs"]

            wait_until(has_stepped, "the first step", head, pause_s=0.5)
            ending = f"-m raystride.pipelines.launch.deploy.before_end --head --seconds 100 --address {address}"
            subprocess.run([sys.executable, *ending.split()], env=environment, check=True, timeout=150)
            assert request_json(job)["status"] == "STOPPED"
            assert '"status": "stopped"' in (tmp_path / "mine" / "summary.json").read_text()
        finally:
            head.terminate()
            head.wait()
            shutil.rmtree(folder, ignore_errors=True)
