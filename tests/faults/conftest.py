"""The undisturbed run with which faults are compared: one for all files, and for all processes of a session."""

import json
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.faults.moments import finish, short_job
from tests.tiny import write_text


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, Any]:
    """The summary of `short_job` over a text of 6,000 words, on one worker that nothing disturbs."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "undisturbed"
    folder.mkdir(exist_ok=True)
    kept: Path = folder / "kept.json"
    with FileLock(folder / "lock"):
        if not kept.exists():
            kept.write_text(json.dumps(finish(short_job(write_text(folder, 6_000), folder, "undisturbed"), 1, folder)))
    return dict(json.loads(kept.read_text()))
