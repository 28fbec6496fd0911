"""What `benchmarks.gpu` measures, in the order of its worth: is it right, how fast, how fast do models train, is it exact?

Each row begins in the same state: trainings, which leave choices behind, have processes of their own, as checks have. A row
of a kernel fails unless its kernel ran, one of a training unless its operations ran as its settings say. Predicted seconds
are for an H100 with compiled kernels not yet in Triton's cache; they decide what a budget leaves out.

    for row in rows(Path("benchmarks/results"), rounds=3): print(row.name, row.seconds)
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np

from benchmarks.gpu_record import Row
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.observability.record.entry import Entry
from raystride.pipelines.observability.record.sender import Receipt
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from raystride.triton_kernels.configurations import KERNELS
from raystride.triton_kernels.dispatch import NoCompiler, NotRun, choice_kept, only_kernels, use_kernels, use_library

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 20_000_000
"""Of the random text."""
TRAINING_S = 35.0
"""Of a training's steps; loading, compiling and the first step come on top."""
SHIPPED = ("attention D 64", "attention D 128", "linear_cross_entropy", "rms_norm", "layer_norm", "adamw", "rope")
"""Checks that come first, of bf16; the others, and fp32 and fp16, come last."""
FIRST_CASES = (
    *("attention: D 128, T 4096, causal*", "attention: D 128, T 16384, causal*", "linear_cross_entropy:*", "adamw:*"),
    *("rms_norm:*", "layer_norm:*"),
)
"""Patterns of kernels' cases that come before the others, in this order."""
KEPT = ("steps", "tokens_per_second", "mfu", "train_loss", "step_seconds_p50", "peak_memory_bytes", "data_wait_share")
EXACT_STEPS = 20
TRITON = {"kernels": "triton", "attention": "triton"}
"""Settings of the section `model`."""
AUTO = {"kernels": "triton", "attention": "auto"}
PYTORCH = {"kernels": "torch"}


def rows(results: Path, rounds: int) -> Iterator[Row]:
    """Every row, the most telling first; `results` is where traces go."""
    yield Row("one launch", 20.0, launch_once)
    shipped = tuple(f"{name}*, bfloat16" for name in SHIPPED)
    yield Row("check what ships, bfloat16", 90.0, partial(check, shipped, 90.0), place="children")
    first_trainings, *trainings = _training_rows()
    yield from first_trainings
    yield from _kernel_rows(rounds)
    for some in trainings:
        yield from some
    for slots in (1, 2, 4):
        yield Row(f"the same bits twice, {slots} slots", 15.0, partial(train_twice, slots), place="child")
    yield Row("check everything else", 240.0, partial(check, ("*",), 240.0), place="children")
    yield Row("check far offsets", 60.0, partial(check, ("*",), 60.0, far=True), place="children")
    yield Row("compute-sanitizer", 300.0, sanitize, place="children")
    yield Row("Nsight Systems", 60.0, partial(trace, results), place="children")
    for kernel in KERNELS:
        for head_size in (64, 128):
            yield Row(f"tiles of {kernel}, D {head_size}", 30.0, partial(try_tiles, kernel, head_size, rounds))


def _kernel_rows(rounds: int) -> list[Row]:
    from benchmarks.kernels import cases

    named = {f"{case.operation}: {case.label}": case for case in cases("all")}
    first = [name for pattern in FIRST_CASES for name in named if fnmatch(name, pattern)]
    return [
        Row(name, 4.0 if named[name].operation == "attention" else 6.0, partial(figure, named[name], rounds))
        for name in dict.fromkeys((*first, *named))
    ]


def _training_rows() -> tuple[list[Row], list[Row], list[Row]]:
    """Rows of GPT-2 small with each backend, with further settings that change its speed, and of a larger model."""
    loose = {"deterministic": False}

    def small(what: str, model: dict[str, str], **changes: Any) -> Row:
        return Row(f"lm_124m: {what}", TRAINING_S + 25, partial(train, gpt2_small(), model, **changes), place="child")

    backends = {"Triton": TRITON, "PyTorch": PYTORCH, "attention auto": AUTO}
    return (
        [small(what, model) for what, model in backends.items()],
        [
            *(small(f"{what}, not deterministic", model, **loose) for what, model in backends.items()),
            small("Triton, compiled", TRITON, compile="block"),
        ],
        [
            Row(f"lm_1b: {what}", TRAINING_S + 40, partial(train, one_billion(), model), place="child")
            for what, model in backends.items()
        ],
    )


def launch_once(device: str = "cuda") -> dict[str, Any]:
    """Compiles and launches one small kernel, which needs a C compiler and Python's headers.

    Raises NoCompiler if they lack, and NotRun if no kernel would run.
    """
    import torch

    from raystride.triton_kernels.device_checks import check_call
    from raystride.triton_kernels.gelu import gelu, gelu_reference

    began = time.perf_counter()
    found = check_call(("one launch", gelu, gelu_reference, [(4096,)]), torch.device(device), torch.float32, 2)
    NoCompiler.raise_for(found.problem)
    if found.not_run:
        raise NotRun(found.not_run)
    assert not found.failed, found.verdict
    return {"seconds": time.perf_counter() - began, "verdict": found.verdict}


def check(
    patterns: tuple[str, ...], seconds: float, *, far: bool = False, device: str = "cuda", processes: int = 0
) -> dict[str, Any]:
    """Checks kernels on the device in as many processes as there are cores, since most of the time compiles.

    Shows each result as it comes, and counts what has none after four times the predicted seconds. Raises AssertionError
    that names what is wrong, NotRun if no check ran, and NoCompiler.
    """
    from raystride.triton_kernels.device_checks import list_checks, run_in_children

    items = list_checks(device, patterns=patterns, far=far)
    found, deadline = [], time.monotonic() + 4 * seconds
    for _, one in run_in_children(items, processes=1 if far else processes, deadline=deadline):
        found.append(one)
        print(f"  {one.name}: {one.verdict}", flush=True)
    wrong = [f"{one.name}: {one.verdict}" for one in found if one.failed]
    ran = [one for one in found if not one.not_run]
    counts = {"checks": len(ran), "not_run": len(found) - len(ran), "left": len(items) - len(found)}
    if wrong:
        raise AssertionError(f"{len(wrong)} of {counts}: {'; '.join(wrong)}")
    if not ran:
        raise NotRun(next((one.not_run for one in found), "no check had a result in time"))
    return counts | {"worst": max(one.error for one in ran)}


def figure(case: Any, rounds: int) -> dict[str, Any]:
    """A case of `benchmarks.kernels`, beside its peers."""
    import torch

    from benchmarks.kernels import figure as measured

    with one_state():
        try:
            return asdict(measured(case, rounds))
        finally:
            torch.cuda.empty_cache()


@contextmanager
def one_state() -> Iterator[None]:
    """The state in which every row of a kernel begins: no choice of kernels or library, nothing deterministic."""
    import torch

    use_kernels("auto")
    use_library(False)
    torch.use_deterministic_algorithms(False)
    with choice_kept():
        yield


def gpt2_small() -> Config:
    """`configs/lm_124m.yaml`, as short as a measurement can be."""
    config = from_yaml(Config, (ROOT / "configs" / "lm_124m.yaml").read_text())
    return replace(
        config,
        train=replace(config.train, hours=TRAINING_S / 3600, log_every=5),
        validation=replace(config.validation, every=0, samples=16),
        checkpoint=replace(config.checkpoint, every=0),
        record=replace(config.record, mlflow=False),
        sample=replace(config.sample, tokens=0),
    )


def one_billion() -> Config:
    """A Llama of 1.0 billion parameters on 2,048 tokens."""
    small = gpt2_small()
    shape = {
        "architecture": "llama",
        "layers": 18,
        "hidden_size": 2048,
        "heads": 16,
        "kv_heads": 16,
        "context": 2048,
        "bias": False,
    }
    return replace(small, model=replace(small.model, **shape), train=replace(small.train, slots=8, slot_size=4))


def train(config: Config, model: Mapping[str, str], device: str = "cuda", **changes: Any) -> dict[str, Any]:
    """Trains on random text by the worker that `--launch inline` runs; the figures of its summary. `model` and `changes` are
    settings of those sections."""
    from raystride.pipelines.train.worker.run import run_worker

    config = replace(config, model=replace(config.model, **model), train=replace(config.train, **changes))
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        folder = Path(scratch)
        job = Job(
            config=config,
            run="measured",
            attempt="a1",
            folder=Folder.from_uri(str(folder / "run")),
            prepared=random_text(folder, config.tokenizer.vocabulary_size, TOKENS if device == "cuda" else TOKENS // 1000),
            device=device,
            threads=1,
        )
        summary = run_worker(job, WorkerInfo(), _acknowledge, lambda: False)
    expect_kernels(summary.get("kernels", {}), model["kernels"])
    return {key: summary.get(key) for key in (*KEPT, "kernels", "parameters_sha256")}


def expect_kernels(ran: Mapping[str, str], choice: str) -> None:
    """Raises NotRun unless a training's operations ran as its settings say: kernels and libraries, or PyTorch alone."""
    allowed = ("triton", "library") if choice == "triton" else ("torch",)
    if others := [f"{name} by {how}" for name, how in ran.items() if how not in allowed]:
        raise NotRun(f"model.kernels is {choice}, but {', '.join(others)}")


def train_twice(slots: int, device: str = "cuda") -> dict[str, Any]:
    """A short exact training, twice. Raises AssertionError where the bits differ."""
    config = gpt2_small()
    config = replace(
        config,
        model=replace(config.model, layers=4, hidden_size=256, heads=4, context=256),
        train=replace(
            config.train,
            hours=0,
            steps=EXACT_STEPS,
            slots=slots,
            slot_size=4,
            exact=True,
            precision="fp32",
            micro_batch_slots=1,
        ),
    )
    first, second = (train(config, TRITON if device == "cuda" else PYTORCH, device)["parameters_sha256"] for _ in range(2))
    if first != second:
        raise AssertionError(f"the parameters differ after {EXACT_STEPS} steps: {first} and {second}")
    return {"parameters_sha256": first}


def random_text(folder: Path, words: int, tokens: int) -> Folder:
    """A prepared folder of ids that follow Zipf's law, as words do; the speed of a step does not depend on their order."""
    prepared = folder / "prepared"
    shards: dict[str, Shards] = {}
    for split, count in (("train", tokens), ("validation", max(tokens // 100, 40_000))):
        (prepared / split).mkdir(parents=True, exist_ok=True)
        ids = (np.random.default_rng(0).zipf(1.3, count) % words).astype(np.uint16)
        ids.tofile(prepared / split / "00000.arrow")
        shard = Shard(file=f"{split}/00000.arrow", tokens=count, documents=1, bytes=ids.nbytes, sha256="", ids_offset=0)
        shards[split] = Shards.from_shards([shard])
    place = Folder.from_uri(str(prepared))
    Manifest(fingerprint="random", id_type="uint16", vocabulary_size=words, end_id=0, splits=shards).save(place)
    return place


def _acknowledge(sender: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
    """A recorder that keeps nothing; it lets what matters be seen."""
    for entry in entries:
        if entry["kind"] in ("event", "error"):
            print(f"  {entry['values'].get('text', '')}", flush=True)
    last = entries[-1]["sequence"] if entries else 0
    return Receipt("nobody", last, last)


def sanitize() -> dict[str, Any]:
    """compute-sanitizer's memcheck over small calls of each kernel and rule. Raises RuntimeError with what it said."""
    return _run([sys.executable, "-m", "benchmarks.kernel_tools.sanitize", "--tool", "memcheck"])


def trace(results: Path) -> dict[str, Any]:
    """An Nsight Systems trace of small calls of each kernel, beside the figures. Raises RuntimeError where nsys cannot."""
    if which("nsys") is None:
        raise NotRun("nsys is not on PATH")
    output = results / "gpu-trace"
    checks = [sys.executable, "-m", "raystride.triton_kernels.device_checks", "--quick"]
    done = _run(["nsys", "profile", "--force-overwrite=true", "--trace=cuda,nvtx", f"--output={output}", *checks])
    return done | {"trace": f"{output.name}.nsys-rep"}


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip()[-600:]
    if done.returncode not in (0, 3):  # 3: what it needs is not there, as it says
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {said}")
    if done.returncode:
        raise NotRun(said)
    return {"said": said}


def try_tiles(kernel: str, head_size: int, rounds: int) -> dict[str, Any]:
    """The shipped tile of a kernel beside its alternatives."""
    from benchmarks.tiles import compare

    with one_state(), only_kernels():
        return compare(kernel, head_size, length=4096, rounds=rounds).figures()


def with_stand_in(row: Row, speed: float, faults: dict[str, Callable[[], Any]]) -> Row:
    """The row with a stand-in for the GPU: it sleeps as long as was predicted, by so much faster, or fails as told."""

    def stand_in() -> dict[str, float]:
        time.sleep(row.seconds / speed)
        return {"rehearsed_s": row.seconds}

    return replace(
        row, seconds=row.seconds / speed, measure=faults.get(row.name, stand_in), least_s=row.least_s / speed, place="here"
    )
