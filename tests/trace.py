"""One sample's way through the code: the files of ours that it enters between its shard and its record.

One inline step of a small language model and its record, watched by `sys.setprofile` and `threading.setprofile`:

    python -m tests.trace                                     # the files in order, their number, and the files returned to
"""

import sys
import tempfile
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

RECORDED_S = 15.0
"""By then the recorder has written its journal and told MLflow, whose import takes seconds."""


def ways(steps: int = 1) -> dict[str, list[str]]:
    """By thread, the files of ours in the order in which calls entered them; neighbours that are equal count once."""
    import raystride

    entered: dict[str, list[str]] = {}
    watching = threading.Event()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and watching.is_set() and "/raystride/" in name and name.endswith(".py"):
            way = entered.setdefault(threading.current_thread().name, [])
            file = name.split("/raystride/")[-1]
            if not way or way[-1] != file:
                way.append(file)

    settings = {
        "data.source": "arithmetic", "tokenizer.kind": "bytes", "launch.mode": "inline",
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 16}, "sample.tokens": 0, "validation.every": 0,
        "train": {"steps": steps, "slots": 1, "slot_size": 1, "log_every": 1}, "checkpoint.every": 0,
    }  # fmt: skip
    from raystride.pipelines.launch import inline
    from raystride.pipelines.observability.record.recorder import Recorder
    from raystride.pipelines.train.loop import Training

    train = Training._train_steps

    def until_the_record_has_it(training: Training) -> Any:
        """The steps alone, with what the recorder's threads do meanwhile: it logs to MLflow beside the training."""
        sys.setprofile(note)
        watching.set()
        try:
            return train(training)
        finally:
            sys.setprofile(None)
            time.sleep(RECORDED_S)
            watching.clear()

    with tempfile.TemporaryDirectory() as storage:
        raystride.prepare({}, settings, storage=storage)
        threading.setprofile(note)
        inline._start = lambda arguments: Recorder(**arguments)  # in this process, where it can be watched
        Training._train_steps = until_the_record_has_it  # type: ignore[method-assign]
        try:
            raystride.train({}, settings, run="traced", storage=storage)
        finally:
            Training._train_steps = train  # type: ignore[method-assign]
            threading.setprofile(None)  # type: ignore[arg-type]
    return entered


def main() -> None:
    """Prints the way of each thread, and the count over all."""
    entered = ways()
    for thread, way in entered.items():
        print(f"{thread}: {len(set(way))} files")
        for file in dict.fromkeys(way):
            print(f"  {file}")
    returns = Counter(file for way in entered.values() for file in way)
    often = [f"{file} {count - 1}" for file, count in returns.most_common() if count > 3]
    print(f"returned to more than twice: {', '.join(often) or 'none'}")
    files = {file for way in entered.values() for file in way}
    print(f"{len(files)} files of ours in one step and its record")


if __name__ == "__main__":
    main()
