"""A walk over the files that runs leave: each kind with faults, and how resume, evaluate, predict, list and report end.

A storage is made by a language model (exact), one with its own tokenizer, a classifier, adapters on a run and on an
export, a mixture, a `fit` and a sweep; by their evaluations, predictions and exports. Its kinds of files are those that lie
there. A case is one file, one fault and one operation, and ends right (the bits and figures of an undisturbed one), refused
with the file's name, or wrong.

    python -m tests.faults.walk --each 25 --seed 7            # 25 faults a kind; a table by kind, in Markdown
    python -m tests.faults.walk --with ray --each 3           # a run of two workers and a sweep by Ray Tune, too
    python -m tests.faults.walk --with store --each 3         # some of the runs, on an S3 server
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LaunchConfig,
    LoraConfig,
    OptimizerConfig,
    SampleConfig,
    ScalingConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.system.storage.folder import Folder
from tests.flips import flip
from tests.fork_server import CONTEXT
from tests.storage import server, uri
from tests.tiny import tiny, write_text

STEPS, MORE_STEPS = 6, 8
OPERATIONS = ("resume", "evaluate", "predict", "list", "report")
WEIGHTS = (6, 2, 2, 1, 1)
"""How often the operations are drawn where a case has one."""
FAULTS = ("one bit", "three bits", "cut", "emptied", "removed", "a folder", "another's")
SUMMARY = ("parameters_sha256", "steps", "samples_seen", "tokens_seen", "train_loss", "val_loss")
REFUSED = (2, 3)
"""Exit codes of refusals."""
ON_STORE = ("decoder", "labels", "adapters", "fit")
"""The runs of a storage on an S3 server."""
SWEEPS = ("swept", "tuned")
"""Names of sweeps: over adapters of one base, in this process, and by Ray Tune."""


# What makes the storage.


@dataclass(frozen=True)
class Storage:
    """Where the runs lie: a folder, and its address, which on an S3 server is another one."""

    files: Path
    """Its folder; of a store a copy."""
    address: str
    with_ray: bool = False

    @property
    def is_store(self) -> bool:
        return self.address != str(self.files)

    @property
    def place(self) -> Path:
        """The folder of what is no run's: texts."""
        return self.files.parent

    def run_folder(self, run: str) -> Path:
        """Returns the folder of a run as it is now; of a store a copy."""
        if self.is_store:
            shutil.rmtree(self.files / run, ignore_errors=True)
            self.copy_to(self.files / run, run)
        return self.files / run

    def copy_to(self, place: Path, below: str = "") -> None:
        """Copies the storage, or a folder below it."""
        if not self.is_store:
            shutil.copytree(self.files / below, place, symlinks=True)
            return
        folder = Folder.from_uri(self.address) / below
        for name in folder.sizes(temporary=True):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(folder.read(name))

    def restore(self, kept: Path) -> None:
        """Replaces the storage by a copy of it."""
        shutil.rmtree(self.files, ignore_errors=True)
        shutil.copytree(kept, self.files, symlinks=True)
        if self.is_store:
            Folder.from_uri(self.address).remove()
            for path in filter(Path.is_file, kept.rglob("*")):
                self.put(str(path.relative_to(kept)))

    def put(self, file: str) -> None:
        """Puts a file of the copy into a store, or removes it there; a folder becomes an object below its name."""
        if not self.is_store:
            return
        folder, path = Folder.from_uri(self.address), self.files / file
        if path.is_file():
            folder.put(file, path.read_bytes())
        else:
            folder.remove(file)
            if path.is_dir():
                folder.put(f"{file}/inside", b"")

    def of(self, run: str, *parts: str) -> str:
        """Returns the address of a run's folder, or of a folder in it."""
        folder = Folder.from_uri(self.address) / run
        for part in parts:
            folder /= part
        return folder.uri


class Rows(torch.utils.data.Dataset[Any]):
    """Numbers and twice these."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, n: int) -> Any:
        return torch.tensor([n / 40]), torch.tensor([n / 20])


def _network() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def _loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def _apply(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.as_tensor(model(batch[0]))


def _fit(storage: Storage, steps: int) -> None:
    import raystride

    settings = {"train.steps": steps, "train.slots": 4, "train.slot_size": 2, "checkpoint.every": 2, "checkpoint.keep": 2}
    settings |= {"launch.mode": "inline", "record.mlflow": False, "data.validation_fraction": 0.2, "validation.every": 2}
    settings |= {"optimizer.schedule": "constant", "train.log_every": 2}  # the loss is the mean since it was logged
    raystride.fit(_network, Rows(), _loss, settings=settings, run="fit", storage=storage.address)


def _configs(storage: Storage) -> dict[str, Config]:
    """The settings of the runs, in the order in which they need each other."""
    place = storage.place
    decoder = tiny(
        place / "text.txt",
        launch=LaunchConfig(mode="inline"),
        # Constant: with another last step, the steps since an earlier checkpoint would be others.
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
        train=TrainConfig(steps=STEPS, slots=4, slot_size=2, log_every=2, exact=True),
        checkpoint=CheckpointConfig(every=2, keep=2),
        validation=ValidationConfig(every=2, samples=8),
        sample=SampleConfig(tokens=4),
    )
    sources = {name: {"source": str(place / f"{name}.txt"), "weight": 0.5} for name in ("text", "sums")}
    labels = DataConfig(source=str(place / "labels.csv"), validation="hash", validation_fraction=0.3)

    def adapted(base: str) -> Config:
        return replace(decoder, model=replace(decoder.model, init_from=base), lora=LoraConfig(rank=2))

    runs = {
        "decoder": decoder,
        "learned": replace(decoder, tokenizer=TokenizerConfig(kind="bpe", vocabulary_size=270)),
        "labels": replace(decoder, task="classification", data=labels, sample=SampleConfig(tokens=0)),
        "mixture": replace(
            decoder, data=DataConfig(sources=sources, kind="text", validation="tail", validation_fraction=0.1)
        ),
        "adapters": adapted(storage.of("decoder")),
        "refined": adapted(storage.of("decoder", "export", "hugging_face")),
    }
    if storage.with_ray:
        launch, scaling = LaunchConfig(address="local"), ScalingConfig(workers=2)
        runs["parallel"] = replace(decoder, launch=launch, scaling=scaling)
    return {name: config for name, config in runs.items() if name in ON_STORE or not storage.is_store}


def _sweep(storage: Storage, name: str) -> None:
    """Measures what is missing of a sweep."""
    from raystride.pipelines.config.parse import Parsed
    from raystride.pipelines.launch.console.exit_codes import run_with_exit_code
    from raystride.pipelines.sweep.sweep_job import run_sweep

    config = _configs(storage)["refined" if name == "swept" else "decoder"]
    sweep = SweepConfig(space={"optimizer.learning_rate": [1e-3, 1e-2]}, warmup_steps=2, window_steps=2, windows=3)
    if name == "swept":
        sweep = replace(sweep, share_base=True, objective="loss")
    else:
        config = replace(config, launch=LaunchConfig(address="local"), scaling=ScalingConfig(workers=1))
    config = replace(config, run=name, storage=storage.address, train=replace(config.train, exact=False))
    parsed = Parsed(SweepJobConfig(**vars(config), sweep=sweep), preset="", has_source=True)
    if code := run_with_exit_code(lambda: run_sweep(parsed)):
        sys.exit(code)


def _build(storage: Storage) -> None:
    import raystride

    place = storage.place
    place.mkdir(parents=True, exist_ok=True)
    write_text(place, 6_000)
    (place / "sums.txt").write_text("".join(f"{i}+{i}={2 * i}\n" for i in range(200)))
    (place / "questions.txt").write_text("line 1\nline 2\nline 3\n")
    sides = ("the market fell", "no"), ("our team won", "yes"), ("a price rose", "no"), ("what a goal", "yes")
    lines = [f"{text} {n},{label}\n" for n in range(15) for text, label in sides]
    (place / "labels.csv").write_text("text,label\n" + "".join(lines))
    for name, config in _configs(storage).items():
        raystride.train(config, run=name, storage=storage.address)
        for operation in ("evaluate", "predict"):
            _operate(operation, name, storage)
        if name in ("decoder", "adapters"):
            raystride.export(name, "hugging_face", storage=storage.address)
        if name == "labels":
            raystride.export(name, "mlflow", storage=storage.address)
    _fit(storage, STEPS)
    raystride.export("fit", "state_dict", storage=storage.address)
    for name in () if storage.is_store else SWEEPS[: 1 + storage.with_ray]:
        _sweep(storage, name)


# Operations: each returns what must be equal afterwards.


def _operate(operation: str, run: str, storage: Storage) -> Any:
    """Does one operation as its command does, or `fit` for its run; raises SystemExit with the exit code of a refusal."""
    common = ["--run", run, "--storage", storage.address]
    if operation == "list":
        _command(["runs", "list", "--storage", storage.address])
        return None  # what it has printed
    if operation == "report" and run not in SWEEPS:
        _command(["report", *common])
        return None
    if run in SWEEPS:
        _sweep(storage, run)
        trials = (storage.run_folder(run) / "trials").glob("*.json")
        return {path.stem: [(trial := json.loads(path.read_text()))["status"], trial["speeds"]] for path in trials}
    if run == "fit":
        return _operate_fit(operation, storage)
    inline = ["--launch.mode", "inline"]
    if operation == "resume":
        _command(["train", *common, "--train.steps", str(MORE_STEPS), *inline, "--scaling.workers", "1"])
        return _figures(storage.run_folder(run))
    if operation == "evaluate":
        split = ["--split", "validation"]
        if run == "mixture":
            split = ["--split", "test", "--data.test_source", str(storage.place / "sums.txt")]
        _command(["evaluate", *common, *split, *inline])
        scores = json.loads((storage.run_folder(run) / "evaluate" / split[1] / "metrics.json").read_text())
        return {key: scores[key] for key in ("metrics", "samples", "step")}
    sample = ["--sample.tokens", "4", "--sample.temperature", "0"]
    _command(["predict", *common, "--text", "line 1", *sample])
    files = ["--input", str(storage.place / "questions.txt"), "--output", storage.of(run, "answers"), *inline]
    _command(["predict", *common, *files, *sample])
    return _read_answers(storage.run_folder(run) / "answers")


def _operate_fit(operation: str, storage: Storage) -> Any:
    import raystride
    from raystride.pipelines.launch.console.exit_codes import run_with_exit_code

    found: list[Any] = []

    def work() -> int:
        if operation == "resume":
            _fit(storage, MORE_STEPS)
            found.append(_figures(storage.run_folder("fit")))
        else:
            filled = raystride.Run.open("fit", storage.address).load_model(into=_network())
            found.append([value.tolist() for value in filled.state_dict().values()])
        return 0

    if code := run_with_exit_code(work):
        sys.exit(code)
    return found[0]


def _command(words: list[str]) -> None:
    from raystride.command import run

    if code := run(words):
        sys.exit(code)


def _figures(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    return {key: summary[key] for key in SUMMARY}


def _read_answers(folder: Path) -> list[Any]:
    from pyarrow.parquet import ParquetFile

    return [row for file in sorted(folder.glob("*.parquet")) for row in ParquetFile(file).read().to_pylist()]


@dataclass(frozen=True)
class Ending:
    """How an operation has ended in a process of its own."""

    code: int
    """Its exit code; -1 for an exception that no command answers."""
    printed: str
    result: Any


def _work(place: Path, variables: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    # Errors have a file descriptor's output, too.
    printed = os.open(place / "printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(printed, number)
    code, result = 0, None
    with open(1, "w", closefd=False) as stream, redirect_stdout(stream), redirect_stderr(stream):
        try:
            result = function(*arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            code = -1
            traceback.print_exc()
    (place / "ending").write_text(json.dumps([code, result]))


def in_child(function: Callable[..., Any], *arguments: Any) -> Ending:
    """Calls a function in a forked process, which has no caches of earlier ones."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        place = Path(name)
        process = CONTEXT.Process(target=_work, args=(place, dict(os.environ), function, arguments))
        process.start()
        process.join()
        printed = (place / "printed").read_text(errors="replace")
        if not (place / "ending").exists():
            return Ending(-1, f"{printed}\nthe process ended with {process.exitcode}", None)
        return Ending(*(lambda code, result: (code, printed, result))(*json.loads((place / "ending").read_text())))


# The storage, its kinds, and cases.


@dataclass(frozen=True)
class Case:
    """A file with a fault, and an operation on a run that may need it."""

    file: str
    """Path below the storage."""
    fault: str
    operation: str
    run: str
    seed: int
    """Of the fault's place."""

    @property
    def kind(self) -> str:
        return kind_of(self.file)


@dataclass(frozen=True)
class Outcome:
    """How a case has ended."""

    case: Case
    ended: str
    """`right`, `refused` or `wrong`."""
    message: str = ""


def kind_of(file: str) -> str:
    """Returns a path without the names of runs, attempts and hashes, and without numbers."""
    first, _, rest = file.partition("/")
    if first in SWEEPS and rest:
        return f"SWEEP/{re.sub('[0-9a-f]{8,}', 'HASH', rest)}"
    path = f"{first if first.startswith('.') or not rest else 'RUN'}/{rest}".rstrip("/")
    path = re.sub(r"(/export/mlflow/code)/.*", r"\1", path)  # a copy of this package
    path = re.sub(r"\d{8}-\d{4,6}[-\w]*?(?=[-./]|$)(-[0-9a-f]{4,8}(?=[-./]|$))*", "ATTEMPT", path)
    path = re.sub(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", "N", path)
    return re.sub(r"(?<![A-Za-z0-9])[0-9a-f]{8,}(?![A-Za-z0-9])", "HASH", path)


class Walk:
    """A storage as the runs left it, and what the operations on it give."""

    def __init__(self, storage: Storage, kept: Path) -> None:
        self.storage, self._kept = storage, kept
        self._references: dict[tuple[str, str], Ending] = {}
        built = in_child(_build, storage)
        if built.code:
            raise RuntimeError(built.printed)
        storage.copy_to(kept)

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """The files by kind, as paths below the storage, in the same order in each storage: hashes differ."""
        kinds: dict[str, list[str]] = {}
        for path in sorted(self._kept.rglob("*")):
            name = str(path.relative_to(self._kept))
            is_of_trial = any(name.startswith(f"{sweep}-") for sweep in SWEEPS)  # as a run's
            if path.is_file() and not path.is_symlink() and not is_of_trial:
                kinds.setdefault(kind_of(name), []).append(name)
        for kind, names in kinds.items():
            if kind.startswith(".prepared"):
                names.sort(key=lambda name: (self.users(name), name.split("/")[2:]))
        return kinds

    @cached_property
    def runs(self) -> list[str]:
        """The names of the runs."""
        found = [path.name for path in sorted(self._kept.iterdir()) if (path / "config.yaml").exists()]
        return [name for name in found if "-" not in name]  # trials' have it

    def users(self, file: str) -> list[str]:
        """Returns the runs that may need a file: its own, and those that name its folder."""
        folder = file.split("/")[1 if file.startswith(".") else 0]
        if folder in self.runs:
            bases = ["adapters", "refined", *SWEEPS[:1]] if folder == "decoder" else []
            return [folder, *(run for run in bases if run in self.runs)]
        names = {folder} | {
            path.parent.name for path in self._kept.glob(".prepared/*/manifest.json") if folder in path.read_text()
        }
        found = [
            run
            for run in self.runs
            if any(name in path.read_text() for name in names for path in (self._kept / run).glob("environment.json"))
        ]
        return found or self.runs

    def draw(self, random: Random, kind: str | None = None, fault: str | None = None) -> Case:
        """Returns a case with one operation."""
        file = random.choice(self.files[kind or random.choice(sorted(self.files))])
        while (fault or "another's") == "another's" and len(self.files[kind_of(file)]) == 1:
            fault = random.choice(FAULTS)
        run = random.choice(self.users(file))
        operation = random.choices(OPERATIONS, WEIGHTS)[0]
        return Case(file, fault or random.choice(FAULTS), operation, run, random.randrange(2**32))

    def reference(self, operation: str, run: str) -> Ending:
        """Returns how the operation ends on the storage as it was left."""
        if (operation, run) not in self._references:
            self._restore()
            found = self._references[operation, run] = in_child(_operate, operation, run, self.storage)
            if found.code:
                raise RuntimeError(f"{operation} of {run} without a fault: {found.printed}")
        return self._references[operation, run]

    def run(self, case: Case) -> Outcome:
        """Does a case."""
        expected = self.reference(case.operation, case.run)
        self._restore()
        self._damage(case)
        return judge(case, in_child(_operate, case.operation, case.run, self.storage), expected)

    def _restore(self) -> None:
        self.storage.restore(self._kept)

    def _damage(self, case: Case) -> None:
        random, path = Random(case.seed), self.storage.files / case.file
        content = path.read_bytes()
        if case.fault in ("one bit", "three bits") and content:
            for _ in range(1 if case.fault == "one bit" else 3):
                content = flip(content, random.randrange(8 * len(content)))
            path.write_bytes(content)
        elif case.fault == "cut" and content:
            path.write_bytes(content[: random.randrange(len(content))])
        elif case.fault == "another's":
            others = [name for name in self.files[case.kind] if name != case.file]
            shutil.copyfile(self._kept / random.choice(others), path)
        elif case.fault in ("removed", "a folder"):
            path.unlink()
            if case.fault == "a folder":
                path.mkdir()
        else:
            path.write_bytes(b"")
        self.storage.put(case.file)


def judge(case: Case, ending: Ending, expected: Ending) -> Outcome:
    """Returns the outcome of a case: right, refused with the file's name, or wrong."""
    if ending.code == 0:
        if case.operation == "list":
            same = _lists_the_same(ending.printed, expected.printed)
        else:
            same = _without(ending.result, case) == _without(expected.result, case)
        found = "" if same else f"{ending.result} in place of {expected.result}\n{ending.printed[-3000:]}"
        return Outcome(case, "right" if same else "wrong", found)
    if ending.code not in REFUSED:
        return Outcome(case, "wrong", f"exit code {ending.code}\n{ending.printed[-3000:]}")
    named = any(name in ending.printed for name in _names(case.file))
    return Outcome(case, "refused" if named else "wrong", ending.printed[-3000:])


def _without(result: Any, case: Case) -> Any:
    """Returns a sweep's trials without the speeds of the damaged one, which is measured again."""
    if case.run not in SWEEPS or result is None:
        return result
    return {key: values[:1] if key == Path(case.file).stem else values for key, values in result.items()}


def _names(file: str) -> Iterator[str]:
    """Yields what a message may call a file: its name, or its folder below the run's."""
    path = Path(file)
    yield path.name
    if len(path.parts) > 2:
        yield str(path.parent)
        yield path.parent.name


def _lists_the_same(found: str, expected: str) -> bool:
    """Returns whether each run has its row, with the same figures, none, or the word `damaged`."""

    def rows(printed: str) -> list[list[str]]:
        return [re.split(r"\s{2,}", line.strip())[:-1] for line in printed.splitlines() if line.strip()]

    before, now = ({row[0]: row for row in rows(text) if row} for text in (expected, found))
    return before.keys() == now.keys() and all(
        "damaged" in row or "interrupted" in row or row == before[name] for name, row in now.items()
    )


def table(outcomes: Iterable[Outcome]) -> str:
    """Returns the outcomes by kind, as Markdown."""
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.case.kind, Counter())[outcome.ended] += 1
    total: Counter[str] = sum(counts.values(), Counter())
    lines = ["| kind | cases | right | refused | wrong |", "| --- | ---: | ---: | ---: | ---: |"]
    for kind, found in [*sorted(counts.items()), (f"{len(counts)} kinds", total)]:
        ended = " | ".join(str(found[name]) for name in ("right", "refused", "wrong"))
        lines.append(f"| `{kind}` | {found.total()} | {ended} |")
    return "\n".join(lines)


@contextmanager
def walk(with_: str = "") -> Iterator[Walk]:
    """Builds a storage, and removes it. `with_`: `ray`, further runs by Ray; `store`, on an S3 server; else empty."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name, ExitStack() as stack:
        place = Path(name)
        storage = Storage(place / "runs", str(place / "runs"), with_ray=with_ == "ray")
        if with_ == "store":
            storage = Storage(place / "runs", uri(stack.enter_context(server()), "walked/runs"))
        yield Walk(storage, place / "kept")


def main() -> int:
    """Runs cases, prints what is wrong and the table; returns 1 if something is."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.walk", description=__doc__.split("\n")[0])
    parser.add_argument("--each", type=int, default=3, help="cases a kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="a regular expression of the kinds to take")
    parser.add_argument("--operation", choices=OPERATIONS, help="take this one; by default one is drawn for each case")
    parser.add_argument("--with", choices=("ray", "store"), default="", dest="with_")
    given = parser.parse_args()
    random, outcomes = Random(given.seed), []
    with walk(given.with_) as walked:
        kinds = [kind for kind in sorted(walked.files) if re.search(given.kind or "", kind)]
        print("\n".join(kinds), file=sys.stderr, flush=True)
        for number in range(given.each * len(kinds)):
            case = walked.draw(random, kinds[number % len(kinds)])
            outcome = walked.run(replace(case, operation=given.operation) if given.operation else case)
            outcomes.append(outcome)
            print(f"{number + 1} {outcome.ended}: {case}", file=sys.stderr, flush=True)
            if outcome.ended == "wrong":
                print(f"{outcome.message}\n", file=sys.stderr, flush=True)
    print(table(outcomes))
    return any(outcome.ended == "wrong" for outcome in outcomes)


if __name__ == "__main__":
    os.environ.setdefault("RAYSTRIDE_LINEAR", "torch")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.faults import walk as itself  # so that forked processes find its functions by their module

    sys.exit(itself.main())
