"""How the cost of a run grows: seconds by size, and the exponent between sizes. Above 1 it grows faster than its size.

    steps       the journal of a run is read for its page
    workers     the recorder adds up the times of a step's workers
    shards      prepared data is opened, and a sample of it is located
    documents   a text is tokenised and written, in this process
    runs        `raystride runs list` of a storage
    trials      a sweep's answer, and its page with pictures
    files       a source of so many small files is listed, checked, and divided into parts
    reads       64 windows at random, of so many shards
    sources     the same of a mixture of so many sources with 40 shards each
    packed      one packed file of so many documents is prepared, in this process
    pictures    so many PNG in a tar are prepared, in this process
    stubs       so many files that are only named are divided into parts

The exponent is log(t2 / t1) / log(n2 / n1) between neighbouring sizes: constant costs make it small where sizes are, so
the last one counts. `documents` names the hours of 10^8 by its last exponent. Memory is what an operation adds at most to
that of the process, in MB; the first size of a curve also has what it imports.

    python -m benchmarks.growth                                # twelve curves, some eight minutes on two cores
    python -m benchmarks.growth --curves trials runs --rounds 3
"""

import contextlib
import gzip
import io
import itertools
import math
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import longrun
from benchmarks.amounts import write_pictures
from benchmarks.pairs import command_line, machine, machine_line, report
from benchmarks.scale_recorder import times
from raystride.pipelines.config import Config, DataConfig, ModelConfig, ScalingConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.data.prepare.parts import divide_into_parts
from raystride.pipelines.data.prepare.prepare import check_data, needs_ray, prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.pieces import File
from raystride.pipelines.data.sources.source import Source
from raystride.pipelines.data.sources.text import TextReader
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.run_store import commands
from raystride.pipelines.observability.phases import EXCLUSIVE_PHASES
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.observability.record.entry import Entry
from raystride.pipelines.observability.record.group import Aggregator
from raystride.pipelines.observability.report import gather_figures
from raystride.pipelines.sweep.answer import build_answer
from raystride.pipelines.sweep.report_page import render_page
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.system.storage.folder import Folder

Operation = Callable[[], object]
Size = Callable[[int, Path], contextlib.AbstractContextManager[Operation]]
"""(size, an empty folder) -> within it, the operation that is timed."""


@contextmanager
def steps(size: int, folder: Path) -> Iterator[Operation]:
    """A journal of so many steps of eight workers."""
    longrun.make_journal(run := Folder(str(folder)), size, workers=8)
    yield lambda: gather_figures(read_entries(run))


@contextmanager
def workers(size: int, folder: Path) -> Iterator[Operation]:
    """A hundred steps of so many workers, summed up by step."""
    entries = [times(rank, size, step, step) for step in range(1, 101) for rank in range(size)]

    def add_up() -> list[Entry]:
        group = Aggregator()
        for entry in entries:
            group.ingest(entry)
        return group.drain()

    yield add_up


@contextmanager
def shards(size: int, folder: Path) -> Iterator[Operation]:
    """A manifest of so many shards."""
    longrun.make_data(folder, size)
    (place,) = (path.parent for path in (folder / ".prepared").glob("*/manifest.json"))

    yield lambda: Manifest.load(Folder(str(place))).splits["train"][size - 1]


@contextmanager
def documents(size: int, folder: Path) -> Iterator[Operation]:
    """So many documents of some 500 bytes, a line of JSON each."""
    line = '{"text": "' + "Documents come one by one, and each is written once. " * 10 + '"}\n'
    with (folder / "text.jsonl").open("w") as file:
        for number in range(size):
            file.write(line.replace("one by one", str(number)))
    config = load_settings(
        Config, {"data.source": str(folder / "text.jsonl"), "data.kind": "json", "tokenizer.kind": "bytes"}
    ).settings
    yield _preparing(config, folder)


@contextmanager
def runs(size: int, folder: Path) -> Iterator[Operation]:
    """A storage with so many runs, copies of one without its checkpoints."""
    longrun.make_data(folder, 1)
    longrun.train(folder, 2)
    for number in range(size):
        shutil.copytree(folder / "long", folder / f"run{number}", ignore=shutil.ignore_patterns("checkpoints"))

    def list_all() -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            commands.list_runs(Folder(str(folder)))
        assert f"run{size - 1} " in printed.getvalue()

    yield list_all


@contextmanager
def trials(size: int, folder: Path) -> Iterator[Operation]:
    """A sweep over workers and learning rates with so many measured trials."""
    counts = (1, 2, 4, 8)
    rates = [1e-4 * 1.01**number for number in range(math.ceil(size / len(counts)))]
    base = SweepJobConfig(
        run="sweep",
        tokenizer=TokenizerConfig(kind="bytes"),
        model=ModelConfig(layers=2, heads=2, hidden_size=64, context=64),
        train=TrainConfig(slots=8, slot_size=4),
        scaling=ScalingConfig(workers=1),
        sweep=SweepConfig(space={"scaling.workers": list(counts), "optimizer.learning_rate": rates}),
    )
    results = [_trial(number, counts[number % len(counts)], rates[number // len(counts)]) for number in range(size)]
    yield lambda: render_page(build_answer(base, results, None))


@contextmanager
def files(size: int, folder: Path) -> Iterator[Operation]:
    """So many files of some 50 bytes in folders of 500."""
    for number in range(size):
        if number % 500 == 0:
            (place := folder / f"texts/{number // 500:05}").mkdir(parents=True)
        (place / f"{number:07}.txt").write_text(f"{number} is a text that is not longer than this\n")
    config = load_settings(Config, {"data.source": str(folder / "texts"), "tokenizer.kind": "bytes"}).settings

    def open_all() -> None:
        context = RunContext(config, Folder(str(folder / "storage")), log=lambda _: None)
        check_data(context)
        needs_ray(context)

    yield open_all


@contextmanager
def reads(size: int, folder: Path, streams: int = 1) -> Iterator[Operation]:
    """So many shards of 4,096 ids."""
    random, length = np.random.default_rng(0), 4096
    opened = []
    for stream in range(streams):
        (place := folder / f"{stream}").mkdir()
        found = []
        for number in range(size):
            (place / f"{number}.arrow").write_bytes(np.full(length, number % 2**16, "<u2").tobytes())
            shard = Shard(
                file=f"{number}.arrow", tokens=length, documents=1, bytes=2 * length, sha256="",
                ids_offset=0, mask_offset=None, rows_offset=None, rows=1,
            )  # fmt: skip
            found.append(shard)
        manifest = Manifest(
            fingerprint="f", id_type="uint16", vocabulary_size=2**16, end_id=0, splits={"train": Shards.from_shards(found)}
        )
        opened.append(TokenStream(Folder(str(place)), manifest, "train", NodeCache(folder, 0)))

    def read_windows() -> None:
        for stream in random.choice(opened, 64):
            stream.read_windows(random.integers(0, stream.tokens - 513, 1), 513)

    for stream in opened:  # each shard is mapped once
        stream.read_windows(np.arange(0, stream.tokens, length), length)
    yield read_windows


def sources(size: int, folder: Path) -> contextlib.AbstractContextManager[Operation]:
    """So many sources of 40 shards."""
    return reads(40, folder, size)


def _preparing(config: Config, folder: Path) -> Operation:
    """Returns what prepares the data anew at each call, into a storage of its own."""
    counts = itertools.count()

    def prepare_all() -> None:
        storage = Folder(str(folder / f"storage{next(counts)}"))
        prepare(RunContext(config, storage, log=lambda _: None), build_task(config), on_ray=False)

    return prepare_all


@contextmanager
def packed(size: int, folder: Path) -> Iterator[Operation]:
    """One packed file of so many lines of some 500 bytes, in shards of 1 MiB."""
    with gzip.open(folder / "all.txt.gz", "wt", compresslevel=1) as file:
        for number in range(size):
            file.write(f"{number} " + "Documents come one by one, and each is written once. " * 10 + "\n")
    settings = {"data.source": str(folder / "all.txt.gz"), "data.kind": "lines", "data.shard_mib": 1.0}
    config = load_settings(Config, settings | {"tokenizer.kind": "bytes"}).settings
    yield _preparing(config, folder)


@contextmanager
def pictures(size: int, folder: Path) -> Iterator[Operation]:
    """So many pictures of 24 x 24 of ten classes."""
    write_pictures(folder, size, 24, 24, "PNG")
    config = load_settings(
        Config, {"task": "images", "data.validation": "tail", "data.source": str(folder / "000.tar")}
    ).settings
    yield _preparing(config, folder)


@contextmanager
def stubs(size: int, folder: Path) -> Iterator[Operation]:
    """So many files of a kilobyte that are on no disk."""

    def divide() -> None:
        found = tuple(File(f"/texts/{number:09}.txt", f"{number:09}.txt", 1_000) for number in range(size))
        source = Source("text", found, TextReader())
        assert sum(len(part.slices) for part in divide_into_parts(source, None, DataConfig())) == size

    yield divide


def _trial(number: int, count: int, rate: float) -> Result:
    label = f"workers {count}, learning_rate {rate:.6g}"
    speed = 1e4 * count**0.8 * (1 + 0.01 * (number % 7))
    speeds = tuple(speed * (1 + 0.001 * window) for window in range(4))
    return Result(
        key=f"{number:05}", run=f"sweep-{number:05}", label=label, round=0, status="measured", workers=count, device="cpu",
        settings={"scaling.workers": count, "optimizer.learning_rate": rate}, threads=1, places_per_node=8,
        tokens_per_step=2048, speeds=speeds, step_seconds=tuple(2048 / each for each in speeds),
        shares=dict.fromkeys(EXCLUSIVE_PHASES, 0.14), figures={"peak_memory_bytes": 2**30}, seconds=12.5, overhead_s=7.0,
    )  # fmt: skip


CURVES: dict[str, tuple[Size, tuple[int, ...]]] = {
    "steps": (steps, (1_000, 10_000, 100_000)),
    "workers": (workers, (8, 64, 512)),
    "shards": (shards, (500, 5_000, 50_000)),
    "documents": (documents, (2_000, 20_000, 200_000)),
    "runs": (runs, (10, 100, 1_000)),
    "trials": (trials, (10, 100, 1_000)),
    "files": (files, (1_000, 10_000, 100_000)),
    "reads": (reads, (50, 400, 3_200)),
    "sources": (sources, (1, 8, 64)),
    "packed": (packed, (1_000, 10_000, 100_000)),
    "pictures": (pictures, (300, 3_000, 30_000)),
    "stubs": (stubs, (10_000, 100_000, 1_000_000)),
}


@dataclass(frozen=True)
class Curve:
    """Seconds of one cost by its size, medians of the rounds."""

    name: str
    seconds: dict[int, float]
    memory_mb: dict[int, float]
    """Added to the process's at most, by any round; empty where the system does not tell."""

    @property
    def exponents(self) -> list[float]:
        """Exponents between neighbouring sizes."""
        points = list(self.seconds.items())
        return [
            math.log(later / before) / math.log(larger / size)
            for (size, before), (larger, later) in itertools.pairwise(points)
        ]

    def extrapolate(self, size: int) -> float:
        """Seconds of a larger size by the last exponent."""
        largest, seconds = list(self.seconds.items())[-1]
        return seconds * (size / largest) ** self.exponents[-1]

    def __str__(self) -> str:
        points = ", ".join(f"{size:,}: {seconds:.3g} s" for size, seconds in self.seconds.items())
        exponents = ", ".join(f"{exponent:.2f}" for exponent in self.exponents)
        more = f"; 10^8: {self.extrapolate(10**8) / 3600:.1f} h in one process" if self.name == "documents" else ""
        memory = f"; memory {', '.join(f'{peak:,.0f}' for peak in self.memory_mb.values())} MB" if self.memory_mb else ""
        return f"{self.name:<10} {points}   exponents {exponents}{memory}{more}"


def measure(name: str, rounds: int) -> Curve:
    """Times a cost at each of its sizes."""
    size_of, sizes = CURVES[name]
    found, memory = dict[int, float](), dict[int, float]()
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="growth-") as folder, size_of(size, Path(folder)) as operation:
            seconds, peaks = [], []
            for _ in range(rounds + 1):
                before, began = reset_peak_memory(), time.perf_counter()
                operation()
                seconds.append(time.perf_counter() - began)
                peaks.append(peak_memory() - before)
            found[size] = statistics.median(seconds[1:])  # the first one imports
            memory |= {size: max(peaks) / 1e6} if before else {}
    return Curve(name, found, memory)


def reset_peak_memory() -> int:
    """Makes the peak of the resident set what it is now, and returns it in bytes; 0 where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak_memory()


def peak_memory() -> int:
    """The peak of the resident set in bytes; 0 where the system does not tell."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def main() -> None:
    """Parses the command line and measures."""
    parser = command_line("growth", __doc__, rounds=3)
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES), help="default: all")
    given = parser.parse_args()
    found = machine()
    print(machine_line(found), flush=True)
    curves = []
    for name in given.curves:
        curves.append(measure(name, given.rounds))
        print(curves[-1], flush=True)
    report(
        given,
        found,
        [],
        curves={curve.name: curve.seconds for curve in curves},
        memory_mb={curve.name: curve.memory_mb for curve in curves},
    )


if __name__ == "__main__":
    main()
