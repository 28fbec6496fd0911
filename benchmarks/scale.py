"""What the control plane costs at 8 to 8,192 ranks: our own code at that size, where the ranks are only spoken for.

Each row is measured at its number of ranks. Nothing is trained and no GPU is here: a few processes say what so many workers
would, in the same calls and entries, and what answers them is the real recorder in a Ray actor, the real manifests, plans,
checkpoint metadata and PyTorch's real store. `share` is what a process that all depend on has to do, by what one core can:
beyond 1 it is late for ever. What was not simulated stands in docs/scale.md.

    python -m benchmarks.scale                                # all parts, 15 minutes on two cores
    python -m benchmarks.scale --parts recorder --ranks 8,64
    python -m benchmarks.scale --parts mixture --ranks 80,1000    # of this part, numbers of sources
    # recorder      8,192    512.0 calls/s    0.21 of a core
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.pairs import command_line, machine, machine_line, report
from benchmarks.scale_checkpoint import checkpoint_rows
from benchmarks.scale_recorder import heartbeat_rows, metrics_rows, recorder_rows
from benchmarks.scale_rows import Row
from benchmarks.scale_start import rendezvous_rows
from raystride.pipelines.data.feed.mixture import MAX_SOURCES, Mixture, MixtureSource, build_schedule
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.plan import worker_slots
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.system.storage.folder import Folder

RANKS = (8, 64, 512, 4096, 8192)
SHARDS_A_RANK = 128
"""So that 8,192 ranks have a million: some 20 million tokens each, 2 * 10^13 in all."""

OPEN = """
import sys, time
from pathlib import Path
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.data.prepare.manifest import Manifest
resident = lambda: 4096 * int(Path("/proc/self/statm").read_text().split()[1])
before, began = resident(), time.perf_counter()
folder = Folder(sys.argv[1])
manifest = Manifest.load(folder)
streams = [TokenStream(folder, manifest, split, None) for split in manifest.splits]
print(time.perf_counter() - began, resident() - before)
"""


def data_rows(ranks: int) -> Iterator[Row]:
    """A data manifest with shards for so many workers: committed, and opened in a process of its own."""
    count = SHARDS_A_RANK * ranks
    shards = Shards.from_shards(
        Shard(
            file=f"train/{number:07}.arrow", tokens=20_000_000 + number, documents=9, bytes=40_000_000,
            sha256=f"{number * 0x9E3779B97F4A7C15:064x}"[-64:], ids_offset=512, rows_offset=40_000_000, rows=9,
        )
        for number in range(count)
    )  # fmt: skip
    manifest = Manifest(
        fingerprint="0" * 16,
        id_type="uint16",
        vocabulary_size=50_257,
        end_id=0,
        splits={"train": shards, "validation": shards[:1]},
    )
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        manifest.save(Folder(place))
        saved = time.perf_counter() - began
        size = sum(path.stat().st_size for path in Path(place).iterdir())
        told = subprocess.run([sys.executable, "-c", OPEN, place], capture_output=True, text=True, check=True).stdout
        opened, memory = map(float, told.split())
    yield Row("data manifest, committed", ranks, seconds=saved, bytes=size, note=f"{count:,} shards, once")
    yield Row("data manifest, opened", ranks, seconds=opened, bytes=memory, note="each worker; bytes: of its memory")


def plan_rows(ranks: int) -> Iterator[Row]:
    """Whose the slots of a step are, as each worker works it out for itself."""
    began = time.perf_counter()
    for rank in range(ranks):
        worker_slots(ranks, rank, ranks)
    yield Row("plan, a step's slots", ranks, seconds=(time.perf_counter() - began) / ranks, note="each worker")


def mixture_rows(sources: int) -> Iterator[Row]:
    """A mixture of so many sources, each of which gives four epochs and no more: planned, and found again at a resume."""
    sources = min(sources, MAX_SOURCES)
    sizes = [1_000 + 7 * number for number in range(sources)]
    order = (MixtureSource(f"s{number}", Order(size, number), 4 * size) for number, size in enumerate(sizes))
    there, wanted = list(order), [(0, sizes)]
    build_schedule.cache_clear()
    began = time.perf_counter()
    mixture = Mixture.from_weights(there, wanted)
    planned = time.perf_counter() - began
    content = json.dumps(mixture.to_json())
    build_schedule.cache_clear()
    began = time.perf_counter()
    again = Mixture.from_weights(there, wanted, Mixture.from_json(json.loads(content)), sum(sizes))
    resumed = time.perf_counter() - began
    assert again == mixture
    note = f"{sources} sources with epochs_at_most, {len(mixture.phases)} phases; each worker, once"
    yield Row("mixture, opened", sources, seconds=planned, note=note)
    yield Row("mixture, resumed", sources, seconds=resumed, bytes=len(content), note="bytes: in a checkpoint's manifest")


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    "data": data_rows,
    "plan": plan_rows,
    "mixture": mixture_rows,
    "checkpoint": checkpoint_rows,
    "recorder": recorder_rows,
    "heartbeats": heartbeat_rows,
    "metrics": metrics_rows,
    "rendezvous": rendezvous_rows,
}


def main() -> None:
    """Runs the parts at each size and prints their rows."""
    parser = command_line("scale", __doc__)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks (default %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them (default %(default)s)")
    given = parser.parse_args()
    found = machine("ranks are spoken for by at most two processes")
    print(machine_line(found))
    print(Row.HEAD)
    rows = []
    for part in given.parts.split(","):
        for ranks in map(int, given.ranks.split(",")):
            for row in PARTS[part](ranks):
                print(row, flush=True)
                rows.append(row.figures())
    report(given, found, [], rows=rows)


if __name__ == "__main__":
    main()
