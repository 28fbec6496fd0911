"""The cause of a failure on one screen: rank, step, exception, the lines of traceback that matter, what to try.

print(failure_screen(error, step=120, folder=folder), file=sys.stderr)
"""

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from pipelines.files import Folder

FRAMES = 4
ROOT = Path(__file__).resolve().parents[2]
REMEDIES = (
    (
        r"out of memory|OutOfMemory|Cannot allocate memory|OOM",
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
        r"actor died|ActorDiedError|SIGKILL|died unexpectedly|exit code",
        "a worker was killed, often for memory: see the node's log, lower its memory, or add --launch.restarts 3",
    ),
    (
        r"NCCL|gloo|Connection (reset|closed|refused)|timed out",
        "the network between workers broke, or one of them died: the same command resumes the run",
    ),
    (
        r"Read-only file system|Permission denied",
        "give --storage a folder that every worker can write",
    ),
)


def failure_screen(error: BaseException, *, step: int | None, folder: Folder) -> str:
    """The text for a person, from what a training raised."""
    rank, cause = first_cause(error)
    where = f"rank {rank}" if rank is not None else "the driver"
    at = f", step {step:,}" if step is not None else ""
    lines = [f"training failed: {where}{at}", f"  {_name(cause)}: {_message(cause)}"]
    lines += [f"    {line}" for line in _frames(cause)]
    lines += [f"  try: {remedy}" for remedy in _remedies(cause)]
    lines.append(f"  everything up to the newest checkpoint is kept; the same command resumes it. Record: {folder}")
    return "\n".join(lines)


def first_cause(error: BaseException) -> tuple[int | None, BaseException]:
    """The rank that failed first and what it raised, without Ray's wrapping. Ranks that only lost their peer come last."""
    failures = getattr(error, "worker_failures", None)
    if not failures:
        return None, _unwrapped(error)
    ranked = sorted((_lost_its_peer(cause), rank) for rank, cause in failures.items())
    rank = ranked[0][1]
    return rank, _unwrapped(failures[rank])


def _lost_its_peer(error: BaseException) -> bool:
    return bool(re.search(r"gloo|NCCL|Connection (reset|closed)|peer", f"{type(error).__name__} {error}"))


def _unwrapped(error: BaseException) -> BaseException:
    while (inner := getattr(error, "cause", None)) is not None and isinstance(inner, BaseException):
        error = inner
    return error


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
    return text[:600]


def _frames(error: BaseException) -> list[str]:
    """The last few lines of the traceback that are the user's or ours, innermost last."""
    frames = list(_local_frames(error)) or list(_remote_frames(str(error)))
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


def _remedies(error: BaseException) -> list[str]:
    text = f"{type(error).__name__} {error}"
    found = [remedy for pattern, remedy in REMEDIES if re.search(pattern, text, re.IGNORECASE)]
    return found[:1]
