"""The cause of a failure on one screen: rank, step, exception, the lines of traceback that matter, what to try.

print(failure_screen(error, step=120, folder=folder), file=sys.stderr)
"""

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from raystride.pipelines.credentials import hidden
from raystride.pipelines.files import Folder
from raystride.pipelines.hang.detector import Hung

FRAMES = 4
ROOT = Path(__file__).resolve().parents[2]
OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|allocate memory|MemoryError|bad_alloc|ALLOC_FAILED|running low on memory|\bOOM\b", re.IGNORECASE
)
"""As PyTorch, NumPy, C++, cuBLAS and Ray say it."""
REMEDIES = (
    (
        r"Hung: ",
        "see that file; under Ray --launch.restarts 3 starts a group that hangs again; a longer launch.hang_s waits longer",
    ),
    (
        # First, since Ray's words for it speak of memory as one of the possible causes.
        r"actor died|ActorDiedError|SIGKILL|died unexpectedly|exit code",
        "a worker was killed, often for memory: see the node's log, lower its memory, or add --launch.restarts 3",
    ),
    (
        OUT_OF_MEMORY.pattern,
        "lower train.micro_batch_slots or train.slot_size, or the model's size",
    ),
    (
        r"Diverged|loss is (nan|inf)",
        "lower optimizer.learning_rate, lengthen optimizer.warmup_steps, and look at the data",
    ),
    (
        r"No space left on device|Disk quota",
        "free space under the storage, or lower checkpoint.keep",
    ),
    (
        r"Unreachable",
        "`raystride check` with the same settings says of each host what it reaches",
    ),
    (
        r"NCCL|gloo|Connection (reset|closed|refused)|timed out",
        "the network between workers broke, or one of them died: --launch.restarts 3 resumes the run by itself",
    ),
    (
        r"Read-only file system|Permission denied",
        "give --storage a folder that every worker can write",
    ),
)


class TrainingFailed(RuntimeError):
    """A training ended by an error. Its text is the screen that people see; what it says stands in the attributes."""

    def __init__(self, error: BaseException, *, step: int | None, folder: Folder) -> None:
        super().__init__(hidden(failure_screen(error, step=step, folder=folder)))
        self.rank, self.cause = first_cause(error)
        """The rank that failed first (None: all of them, or the driver), and what it raised."""
        self.step = step
        """How far the run had come; None: not known."""
        self.remedies = list(remedies(self.cause))
        """What to try."""
        self.folder = folder
        """The run's."""


def failure_screen(error: BaseException, *, step: int | None, folder: Folder) -> str:
    """The text for a person, from what a training raised."""
    rank, outer = _first_failure(error)
    cause = _unwrapped(outer)
    where = f"rank {rank}" if rank is not None else "all workers" if isinstance(error, Hung) else "the driver"
    at = f", step {step:,}" if step is not None else ""
    lines = [f"training failed: {where}{at}", f"  {_name(cause)}: {_message(cause)}"]
    lines += [f"    {line}" for line in _frames(outer)]
    lines += [f"  try: {remedy}" for remedy in remedies(cause)]
    lines.append(f"  everything up to the newest checkpoint is kept; the same command resumes it. Record: {folder}")
    return "\n".join(lines)


def first_cause(error: BaseException) -> tuple[int | None, BaseException]:
    """The rank that failed first and what it raised, without Ray's wrapping. Ranks that only lost their peer come last."""
    rank, outer = _first_failure(error)
    return rank, _unwrapped(outer)


def _first_failure(error: BaseException) -> tuple[int | None, BaseException]:
    failures = getattr(error, "worker_failures", None)
    if not failures:
        return None, error
    # Where one worker fails, the others soon lose their connection to it: such errors come last.
    ranked = sorted((_lost_its_peer(cause), rank) for rank, cause in failures.items())
    rank = ranked[0][1]
    return rank, failures[rank]


def _lost_its_peer(error: BaseException) -> bool:
    return bool(re.search(r"gloo|NCCL|Connection (reset|closed)|peer", f"{type(error).__name__} {error}"))


def _unwrapped(error: BaseException) -> BaseException:
    return _chain(error)[-1]


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what it wraps, the cause last."""
    wrapped = (getattr(error, name, None) for name in ("cause", "controller_failure", "health_check_failure"))
    inner = next(filter(None, wrapped), None)
    return [error, *_chain(inner)] if isinstance(inner, BaseException) else [error]


def _name(error: BaseException) -> str:
    # Ray makes a class of both the wrapper and the cause, called RayTaskError(ValueError).
    match = re.search(r"\((\w+)\)$", type(error).__name__)
    return match[1] if match else type(error).__name__


def _message(error: BaseException) -> str:
    """The message alone, where a remote traceback stands before it."""
    text = str(error).strip()
    if "Traceback (most recent call last)" in text or "\x1b[" in text:
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith((" ", "\x1b"))]
        text = lines[-1] if lines else text
        text = text.split(": ", 1)[-1]
    # Ray ends what it says of a dead process with a table of its numbers and a page of advice.
    return text.split("\n\tclass_name:")[0][:600]


def _frames(error: BaseException) -> list[str]:
    """The last few lines of the traceback that are the user's or ours, innermost last."""
    if isinstance(error, Hung):
        frames = [_short(frame) for frame in error.frames]
    else:
        chain = _chain(error)
        # An exception loses its traceback on the way to another process, so the worker has written it into the notes.
        texts = [text for part in chain for text in (*getattr(part, "__notes__", ()), str(part))]
        frames = [frame for text in texts for frame in _remote_frames(text)] or list(_local_frames(chain[-1]))
    ours = [frame for frame in frames if "site-packages" not in frame and "/lib/python" not in frame]
    return (ours or frames)[-FRAMES:]


def _local_frames(error: BaseException) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"{_short(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"


def _remote_frames(text: str) -> Iterator[str]:
    pattern = r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)'
    for file, line, name, code in re.findall(pattern, text):
        yield f"{_short(file)}:{line} in {name}: {code}"


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else file


def remedies(error: BaseException) -> list[str]:
    """What to try against an error: one line, or none."""
    text = f"{type(error).__name__}: {error}"
    found = [remedy for pattern, remedy in REMEDIES if re.search(pattern, text, re.IGNORECASE)]
    return found[:1]
