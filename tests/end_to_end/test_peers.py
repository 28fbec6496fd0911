"""`python -m benchmarks.peers`: its table, its count of lines, and a training that it watches, in this environment alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import remote
from benchmarks.peers.__main__ import Results, measure, options
from benchmarks.peers.counting import code_lines, user_lines
from benchmarks.peers.environments import PINS, WARM
from benchmarks.peers.page import best, draw, table, verdicts
from benchmarks.peers.protocol import NETWORKS, Job, Progress, read_job, read_progress
from benchmarks.peers.rows import ROWS, Sizes, Trained
from benchmarks.peers.ways import HERE, WAYS, Bench
from benchmarks.runs import Failed

RESULTS = [
    {"round": 0, "way": "inline", "row": "start", "figures": {"start": 3.0}},
    {"round": 1, "way": "inline", "row": "start", "figures": {"start": 4.0}},
    {"round": 0, "way": "torch", "row": "start", "figures": {"start": 2.0}},
    {"round": 1, "way": "torch", "row": "start", "figures": {"start": 2.2}},
    {"round": 0, "way": "inline", "row": "speed", "figures": {"speed 1": 12000.0, "speed 2": "one process"}},
    {"round": 0, "way": "torch", "row": "speed", "figures": {"speed 1": 10000.0, "speed 2": 9000.0}},
    {"round": 0, "way": "lightning", "row": "ready", "failed": "no environment: no wheel"},
]


def test_the_table_has_ranges_the_best_in_bold_and_what_failed() -> None:
    text = table(RESULTS)
    assert "| PyTorch | **2.1 [2.0, 2.2]** | 10,000 | **9,000** |" in text
    assert "| ours, inline | 3.5 [3.0, 4.0] | **12,000** | one process |" in text
    assert "| Lightning | failed | failed | failed |" in text
    assert "Lightning, ready: no environment: no wheel" in text
    assert best(RESULTS, "start") == ["torch"]


def test_every_environment_is_warmed_with_what_its_peer_imports() -> None:
    peers = {way.environment for way in WAYS.values() if way.environment}
    assert WARM.keys() == PINS.keys() == {*peers, *remote.PEERS}


def test_where_a_peer_is_better_it_says_so() -> None:
    first, second = verdicts(RESULTS).splitlines()
    assert first == "start to first step, s: the peer is better (ours, inline 3.5, PyTorch 2.1)"
    assert second == "tokens/s, 1 worker: ours is better (ours, inline 12,000, PyTorch 10,000)"


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw(RESULTS, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_comments_docstrings_and_blank_lines_are_no_code() -> None:
    assert code_lines('"""What\nit is."""\n\n# why\nx = 1\n\n\ndef f():\n    """Says."""\n    return x\n') == {5, 8, 10}


def test_lines_of_a_peer_hold_its_model_and_nothing_that_measures() -> None:
    script = HERE / "torch_loop.py"
    alone = len(code_lines(script.read_text()))
    model = len(code_lines((HERE / "plain_loop.py").read_text()))
    assert alone < user_lines(script) < alone + model + len(code_lines((HERE / "characters.py").read_text()))


def test_a_job_survives_its_flags(tmp_path: Path) -> None:
    job = Job(text=tmp_path / "a", progress=tmp_path / "b", folder=tmp_path, steps=7, checkpoint_every=3, resume=True)
    assert read_job("torch_loop", "", job.flags()) == job


def test_progress_is_read_without_a_line_that_is_not_whole(tmp_path: Path) -> None:
    job = Job(text=tmp_path, progress=tmp_path / "progress.jsonl", folder=tmp_path)
    assert read_progress(job.progress) == []
    Progress(job).step(1)
    Progress(job, rank=1).step(2)
    Progress(job).validation(2, 1.5)
    with job.progress.open("a") as stream:
        stream.write('{"event": "st')
    assert [(event["event"], event["step"]) for event in read_progress(job.progress)] == [("step", 1), ("validation", 2)]


def test_figures_of_a_training_come_from_its_events() -> None:
    steps = [{"event": "step", "step": step, "time": 100.0 + step} for step in range(1, 41)]
    losses = [
        {"event": "validation", "step": step, "loss": loss, "time": 100.0 + step} for step, loss in ((20, 2.0), (40, 1.9))
    ]
    done = Trained([*steps, *losses], started_at=90.0)
    assert done.first_step_s() == 11.0
    assert done.tokens_per_second() == 768.0
    assert done.reached_s(1.95) == 50.0
    assert done.reached_s(1.0) == "never: 1.90"
    assert done.last_loss() == 1.9


@pytest.mark.weekly
@pytest.mark.long
def test_a_training_is_watched_and_a_peer_that_cannot_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "results.json"
    text.write_text("to be or not to be\n" * 200)
    bench = Bench(text, tmp_path, tmp_path / "environments")

    def refuse(*_: object) -> None:
        raise Failed("no environment: no network")

    monkeypatch.setattr("benchmarks.peers.environments.make", refuse)
    given = options().parse_args(["--only", "nanogpt", "torch", "--rows", "start", "lines"])
    results = Results(file, [], {}, Sizes())
    measure(given, bench, Sizes(), results)
    assert [(result["way"], result["row"], "failed" in result) for result in results.results] == [
        ("nanogpt", "ready", True),
        ("torch", "start", False),
        ("torch", "lines", False),
    ]
    assert 0 < results.results[1]["figures"]["start"] < 120
    assert Results(None, [file], {}, Sizes()).results == results.results


def test_every_row_and_way_can_be_asked_for() -> None:
    assert options().parse_args([]).only == list(WAYS)
    assert options().parse_args([]).rows == list(ROWS)


def test_the_larger_network_is_the_same_for_all(tmp_path: Path) -> None:
    shape = NETWORKS["10m"]
    job = Job(text=tmp_path / "text", progress=tmp_path / "p.jsonl", folder=tmp_path / "run", network="10m")
    bench = Bench(job.text, tmp_path, tmp_path)
    command = " ".join(WAYS["inline"].training(bench, job))
    assert f"--model.layers={shape.layers} --model.heads={shape.heads} --model.hidden_size={shape.width}" in command
    assert f"--model.context={shape.block} --train.slot_size={shape.batch // 2}" in command
    program = """
from benchmarks.peers import nanogpt, plain_loop
print(sum(parameter.numel() for parameter in plain_loop.GPT(65).parameters()), nanogpt.FLAGS)
"""
    for way in ("fit", "torch"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=HERE.parents[1],
            env=os.environ | WAYS[way].variables(job),
            capture_output=True,
            text=True,
            check=True,
        )
        parameters, flags = done.stdout.split(maxsplit=1)
        assert 9.8e6 < int(parameters) < 10.2e6
        assert f"--n_layer={shape.layers} --n_head={shape.heads} --n_embd={shape.width} --block_size={shape.block}" in flags
