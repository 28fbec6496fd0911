"""One sample's way through the house: the files of ours that it enters between its shard and its record.

One inline step of a small language model and its record, watched by `sys.setprofile` and `threading.setprofile`:

    python -m tests.trace                                     # the files in order, their number, and the files returned to
"""

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def ways(steps: int = 1) -> dict[str, list[str]]:
    """By thread, the files of ours in the order in which calls entered them; neighbours that are equal count once."""
    import raystride

    entered: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/raystride/" in name and name.endswith(".py"):
            way = entered.setdefault(threading.current_thread().name, [])
            file = name.split("/raystride/")[-1]
            if not way or way[-1] != file:
                way.append(file)

    settings = {
        "data.source": "arithmetic", "tokenizer.kind": "bytes", "launch.mode": "inline", "record.mlflow": False,
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 16}, "sample.tokens": 0, "validation.every": 0,
        "train": {"steps": steps, "slots": 1, "slot_size": 1, "log_every": 1}, "checkpoint.every": 0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as storage:
        raystride.prepare({}, settings, storage=storage)
        from raystride.pipelines.train.loop import Training

        run = Training.run

        def watched(training: Training) -> Any:
            threading.setprofile(note)
            sys.setprofile(note)
            try:
                return run(training)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]

        Training.run = watched  # type: ignore[method-assign]
        try:
            raystride.train({}, settings, run="traced", storage=storage)
        finally:
            Training.run = run  # type: ignore[method-assign]
    return entered


def main() -> None:
    """Prints the way of each thread, and the count over all."""
    entered = ways()
    for thread, way in entered.items():
        print(f"{thread}: {len(set(way))} files")
        for file in dict.fromkeys(way):
            print(f"  {file}")
    files = {file for way in entered.values() for file in way}
    print(f"{len(files)} files of ours in one step and its record")


if __name__ == "__main__":
    main()
