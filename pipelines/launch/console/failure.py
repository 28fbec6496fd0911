"""Failure screen of a training: rank, step, exception, the relevant lines of the traceback, and a remedy.

print(failure_screen(error, step=120, folder=folder), file=sys.stderr)
"""

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.hang.detector import Hung
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.errors import SettingError, cause_chain, root_cause
from raystride.pipelines.system.storage.folder import Folder

MAX_FRAMES = 4
PASSING = re.compile(
    r"Hung: |Unreachable|ActorDiedError|actor died|SIGKILL|died unexpectedly|NCCL|gloo|Connection (reset|closed|refused)"
    r"|timed out|TimeoutError|HeadLost",
    re.IGNORECASE,
)
"""Errors that the same command need not meet again: of machines, processes and networks."""
ROOT = Path(__file__).resolve().parents[3]
OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|allocate memory|MemoryError|bad_alloc|ALLOC_FAILED|running low on memory|\bOOM\b", re.IGNORECASE
)
"""Messages of PyTorch, NumPy, C++, cuBLAS and Ray."""
REMEDIES = (
    (
        r"Hung: ",
        "see that file; under Ray --launch.max_restarts 3 starts a group that hangs again; launch.hang_s sets the wait",
    ),
    (
        # Before the pattern for memory, since Ray's message names memory as one of the possible causes.
        r"actor died|ActorDiedError|SIGKILL|died unexpectedly|exit code",
        "a worker was killed, often for memory: see the node's log, lower its memory, or add --launch.max_restarts 3",
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
        r"IsADirectoryError|NotADirectoryError",
        "move away what lies there: it is a folder where a file belongs, or a file where a folder does",
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
        "the network between workers broke, or one of them died: --launch.max_restarts 3 resumes the run by itself",
    ),
    (
        r"Read-only file system|Permission denied",
        "give --storage a folder that every worker can write",
    ),
)


class TrainingFailed(RuntimeError):
    """A training ended by an error. The message is the failure screen; the attributes hold its parts."""

    def __init__(self, error: BaseException, *, step: int | None, folder: Folder) -> None:
        super().__init__(redact(failure_screen(error, step=step, folder=folder)))
        self.rank, self.cause = first_cause(error)
        """The rank that failed first (None: all of them, or the driver), and its exception."""
        self.step = step
        """The last step of the run; None if unknown."""
        self.remedies = list(find_remedies(self.cause))
        """Suggested remedies."""
        self.folder = folder
        """The run's folder."""


def failure_screen(error: BaseException, *, step: int | None, folder: Folder) -> str:
    """Returns the text for people about an exception of a training."""
    rank, wrapped_error = _first_failure(error)
    cause = root_cause(wrapped_error)
    location = f"rank {rank}" if rank is not None else "all workers" if isinstance(error, Hung) else "the driver"
    step_text = f", step {step:,}" if step is not None else ""
    if isinstance(cause, SettingError):  # it says what to change: no line of ours does, and the same command ends so again
        return f"training failed: {location}{step_text}\n  {cause}\n  Record: {folder}"
    if isinstance(cause, DataError):
        kept = "everything up to the newest checkpoint is kept, and after that the same command resumes it"
        return f"training failed: {location}{step_text}\n  {cause}\n  {kept}. Record: {folder}"
    lines = [f"training failed: {location}{step_text}", f"  {_error_name(cause)}: {_error_message(cause)}"]
    lines += [f"    {line}" for line in _relevant_frames(wrapped_error)]
    lines += [f"  try: {remedy}" for remedy in find_remedies(cause)]
    mended = "" if PASSING.search(f"{type(cause).__name__}: {cause}") else "once the cause is mended, "
    lines.append(f"  everything up to the newest checkpoint is kept; {mended}the same command resumes it. Record: {folder}")
    return "\n".join(lines)


def describe_failure(what: str, error: BaseException) -> str:
    """Returns the text for people about an exception of other work: what failed, the cause, its place, and a remedy."""
    cause = root_cause(error)
    lines = [f"{what} failed: {_error_name(cause)}: {_error_message(cause)}"]
    lines += [f"    {line}" for line in _relevant_frames(error)]
    return redact("\n".join([*lines, *(f"  try: {remedy}" for remedy in find_remedies(cause))]))


def first_cause(error: BaseException) -> tuple[int | None, BaseException]:
    """Returns the rank that failed first and its exception, unwrapped from Ray's. Ranks that only lost a peer come last."""
    rank, wrapped_error = _first_failure(error)
    return rank, root_cause(wrapped_error)


def _first_failure(error: BaseException) -> tuple[int | None, BaseException]:
    failures = getattr(error, "worker_failures", None)
    if not failures:
        return None, error
    # When one worker fails, the others soon lose their connections to it: such errors come last.
    ranked = sorted((_is_peer_loss(cause), rank) for rank, cause in failures.items())
    rank = ranked[0][1]
    return rank, failures[rank]


def _is_peer_loss(error: BaseException) -> bool:
    return bool(re.search(r"gloo|NCCL|Connection (reset|closed)|peer", f"{type(error).__name__} {error}"))


def _error_name(error: BaseException) -> str:
    # Ray derives a class from both the wrapper and the cause, called RayTaskError(ValueError).
    match = re.search(r"\((\w+)\)$", type(error).__name__)
    return match[1] if match else type(error).__name__


def _error_message(error: BaseException) -> str:
    """Returns the error's message without a remote traceback before it."""
    text = str(error).strip()
    if "Traceback (most recent call last)" in text or "\x1b[" in text:
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith((" ", "\x1b"))]
        text = lines[-1] if lines else text
        text = text.split(": ", 1)[-1]
    # Ray appends a table of numbers and a page of advice to its message on a dead process.
    return text.split("\n\tclass_name:")[0][:600]


def _relevant_frames(error: BaseException) -> list[str]:
    """Returns the last `MAX_FRAMES` lines of the traceback in the user's code or ours, innermost last."""
    if isinstance(error, Hung):
        frames = [_relative_path(frame) for frame in error.frames]
    else:
        chain = cause_chain(error)
        # An exception loses its traceback between processes, so the worker has put it into the notes.
        texts = [text for part in chain for text in (*getattr(part, "__notes__", ()), str(part))]
        frames = [frame for text in texts for frame in _remote_frames(text)] or list(_local_frames(chain[-1]))
    own_frames = [frame for frame in frames if "site-packages" not in frame and "/lib/python" not in frame]
    return (own_frames or frames)[-MAX_FRAMES:]


def _local_frames(error: BaseException) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"{_relative_path(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"


def _remote_frames(text: str) -> Iterator[str]:
    pattern = r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)'
    for file, line, name, code in re.findall(pattern, text):
        yield f"{_relative_path(file)}:{line} in {name}: {code}"


def _relative_path(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else file


def find_remedies(error: BaseException) -> list[str]:
    """Returns the remedy for an error: a list of one line, or empty."""
    text = f"{type(error).__name__}: {error}"
    matching = [remedy for pattern, remedy in REMEDIES if re.search(pattern, text, re.IGNORECASE)]
    return matching[:1]
