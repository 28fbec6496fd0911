"""Checkpoints: saved in the background, found and verified at the start of an attempt, pruned as they age.

The newest valid manifest is the truth. `last` and `best` are hints for people; old checkpoints lose their data but keep
their manifests, so that the whole history of what was fed can be audited.

    checkpoints = Checkpoints(run / "checkpoints", attempt, keep=3, group=group)
    checkpoints.claim()                                       # whoever wrote here before writes no more
    checkpoints.save(model, optimizer, state, header)         # returns when parameters are copied
    checkpoints.finish()                                      # raises where the last one could not be written
    found = checkpoints.newest()                              # step and manifest, or None
    checkpoints.load(found, model, optimizer)
"""

import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from raystride.pipelines.files import Folder
from raystride.pipelines.retries import transient
from raystride.pipelines.strategies.spread import own_parameters
from raystride.pipelines.train.agreement import put_together
from raystride.pipelines.train.fence import Claim, Superseded, claim_checkpoints, committing
from raystride.pipelines.train.names import MANIFEST, checkpoint_names, step_name
from raystride.pipelines.train.optimizer import Updater
from raystride.pipelines.train.pieces import as_part, here
from raystride.pipelines.train.pruning import data_of, hinted, prune
from raystride.pipelines.train.reading import read
from raystride.pipelines.train.staging import Staging
from raystride.pipelines.train.state import TrainState
from raystride.pipelines.train.whole import FORMAT, INDEXED, check_file

Log = Callable[[str], None]
Answer = TypeVar("Answer")
LINGER_S = 30.0
"""How long a save that is under way is waited for after an error."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole."""

    step: int
    folder: Folder
    manifest: dict[str, Any]
    rank: int = 0
    world: int = 1

    @property
    def data(self) -> Folder:
        """Where its files lie: tensors, tokenizers. Checkpoints of 0.1 have them in a folder of the attempt's name."""
        return self.folder / data_of(self.manifest)

    @property
    def state(self) -> TrainState:
        """The loop's state as it was saved, as this rank goes on with it.

        What the ranks of then fed is shared out among those of now, in case that this step is saved once more.
        """
        state = TrainState.from_json(self.manifest["state"])
        state.parent_step = self.manifest["parent_step"]
        state.parent_position = self.manifest.get("positions", [0])[0]
        fed = (int(digest, 16) for rank, digest in self.manifest["fed"].items() if int(rank) % self.world == self.rank)
        state.fed_digest, state.saved = sum(fed) % 2**64, True
        return state


@dataclass(frozen=True)
class _Save:
    """A save that was begun, with what ties it to the checkpoint before it."""

    step: int
    parent_step: int
    parent_position: int
    fed_digest: int
    best: bool


class Checkpoints:
    """The checkpoints of a run, as one rank sees them. `group` is a process group of their own, None for one worker.

    A save goes on beside the training; its collectives on the training's own group would interleave with the gradients'.
    """

    def __init__(
        self,
        folder: Folder,
        attempt: str,
        *,
        keep: int,
        failures: int = 1,
        group: dist.ProcessGroup | None = None,
        log: Log = print,
        extra: dict[str, bytes] | None = None,
        term: int = 0,
    ) -> None:
        """`term` is the driver's; see `train.fence`."""
        self.folder, self.attempt, self.keep, self.group, self.log = folder, attempt, keep, group, log
        self.term = term
        self.failures = failures
        """Saves in a row that a store may refuse before the run ends."""
        self.extra = extra or {}
        """Small files, by name, that every checkpoint holds: the tokenizer, the settings."""
        self.rank = dist.get_rank() if group else 0
        self.world = dist.get_world_size() if group else 1
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._refused: OSError | None = None
        """What the newest save met, where the next one is to try again; the same on all ranks."""
        self._failed = 0
        """Saves in a row that were refused."""
        self._newest: _Save | None = None
        self._best = ""
        """The step that `best` is to name, until it does."""
        self._notes: deque[str] = deque()
        self._committed: deque[int] = deque()
        self._claim: Claim | None = None
        self.data = attempt
        self._staging = Staging()

    def claim(self) -> None:
        """Lets no other group commit from here on; all ranks call it. One that was given up learns of it, and ends.

        Raises Superseded on all ranks if a later driver has claimed them.
        """
        # Ray's restarts of a group keep the attempt's name; what is drawn here tells their claims and their files apart.
        drawn = torch.tensor([secrets.randbits(32), 0, self.term])
        refusal = None
        if self.rank == 0:
            try:
                drawn[2] = claim_checkpoints(self.folder, Claim(self.attempt, f"{int(drawn[0]):08x}", self.term)).term
            except Superseded as error:
                refusal, drawn[1] = error, 1
        if self.group:
            dist.broadcast(drawn, src=0, group=self.group)
        if drawn[1]:
            raise refusal or Superseded(f"another driver has taken this run over from {self.attempt}, which therefore ends")
        token = f"{int(drawn[0]):08x}"
        self.data = f"{self.attempt}-{token}"
        self._claim = Claim(self.attempt, token, int(drawn[2]))

    def _fence(self) -> AbstractContextManager[None]:
        # A group that stood still while the next one began, and then went on, would replace what that one has saved since.
        return committing(self.folder, self._claim) if self._claim else nullcontext()

    def save(self, model: nn.Module, optimizer: Updater, state: TrainState, header: dict[str, Any], *, best: bool) -> None:
        """Copies everything now and writes it in a thread. Waits first for the save before, as `wait` does."""
        self.wait()
        if (lost := self._newest) and self._refused:
            # Nobody can follow a checkpoint that is not there: this one follows the same parent, and says what both fed.
            if lost.step == state.step:
                best = best or lost.best
            elif state.parent_step == lost.step:
                state.parent_step, state.parent_position = lost.parent_step, lost.parent_position
                state.fed_digest = (state.fed_digest + lost.fed_digest) % 2**64
        self._newest = _Save(state.step, state.parent_step, state.parent_position, state.fed_digest, best)
        tensors, arrived = self._staging.copy(named_tensors(model, optimizer))
        content = {
            **header,
            "world": self.world,
            "step": state.step,
            "parent_step": state.parent_step,
            "positions": [state.parent_position, state.position],
            "state": state.to_json(),
        }
        arguments = (tensors, arrived, content, self._newest)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        # A validation may have this step saved once more; that checkpoint follows the same parent as this one.
        state.saved = True

    def path(self, step: int) -> Folder:
        """The folder in which the checkpoint of a step lies, or will lie."""
        return self.folder / step_name(step)

    def under_way(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def committed(self) -> Iterator[int]:
        """The steps whose checkpoints are complete, and were not when this was last asked. Waits for nothing."""
        while self._committed:
            yield self._committed.popleft()

    def wait(self) -> None:
        """Waits for a save that is under way. One that the store refused is a warning, and the next one tries again.

        Raises what it met when that was one too many in a row, at once where it is no fault of the store's. All ranks were
        told the same of each save, and ask at the same step, so they decide alike.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
            if self._refused is None:
                self._failed = 0
            elif self._newest:
                self._failed += 1
                count = f"{self._failed} in a row, {self.failures} end the run"
                problem = f"{type(self._refused).__name__}: {self._refused}"
                self._notes.append(f"the checkpoint of step {self._newest.step} could not be written ({problem}); {count}")
        while self._notes:
            note = self._notes.popleft()
            if self.rank == 0:
                self.log(f"warning: {note}")
        if self._error:
            error, self._error = self._error, None
            raise error
        if self._refused and self._failed >= self.failures:
            raise self._refused

    @property
    def refused(self) -> bool:
        """Whether the newest save could not be written, as far as `wait` knows."""
        return self._refused is not None and self._thread is None

    def finish(self) -> None:
        """Waits for the last save of the run. Raises what it met."""
        self.wait()
        if self._refused:
            raise self._refused

    def wait_after_error(self) -> None:
        """After an error: a save that is under way may still end, but not hold up the process for ever.

        Where a worker was lost, two that remain could wait for each other: one in its save, the other in a step. Whoever
        ends first frees the other.
        """
        if self._thread:
            self._thread.join(LINGER_S)

    def _write(
        self, tensors: dict[str, torch.Tensor], arrived: Callable[[], None], header: dict[str, Any], what: _Save
    ) -> None:
        # A new thread has Python's lock and keeps it for 5 ms if it can; the loop, which waits for it, goes first.
        time.sleep(0.001)
        from raystride.pipelines.train import index
        from raystride.pipelines.train.storage import CheckpointWriter, NotWritten, save

        names = self.path(what.step), self.attempt, self.data
        asked = self._fence, arrived, self.world > index.MOST_LISTED
        writer = CheckpointWriter(*names, self.rank, header, what.fed_digest, self.extra, *asked)
        try:
            save(tensors, writer, self.group)
            self._refused = None
            self._committed.append(what.step)  # the coordinator answers its ranks when the manifest is there
            if self.rank == 0:
                self._tidy(step_name(what.step), what.best)
        except NotWritten as failed:
            if isinstance(failed.cause, OSError):
                self._refused = failed.cause
            else:
                self._error = failed.cause
        except BaseException as error:
            self._error = error

    def _tidy(self, name: str, best: bool) -> None:
        """What follows a commit, and can follow the next one as well: hints, and the end of what is no longer kept."""
        self._best = name if best else self._best
        try:
            self.folder.put("last", f"{name}\n")
            if self._best:
                self.folder.put("best", f"{self._best}\n")
                self._best = ""
            prune(self.folder, name, self.keep)
        except Exception as error:
            self._notes.append(f"what checkpoint {name} replaces could not be cleared ({type(error).__name__}: {error})")

    def steps(self) -> list[str]:
        """Names of the checkpoints that have a manifest, oldest first; one listing."""
        found = (file.partition("/") for file in self.folder.sizes())
        return checkpoint_names(name for name, _, inside in found if inside == MANIFEST)

    def newest(self) -> Found | None:
        """The newest checkpoint that is whole. All ranks get the same. Raises OSError where the store cannot be asked."""
        return next(self.whole(), None)

    def whole(self) -> Iterator[Found]:
        """The checkpoints that are whole, the newest first; those that are not are named and passed over."""
        for name in reversed(self._of_first(self.steps)):
            problem, manifest = self._problem(self.folder / name)
            if problem is None:
                yield Found(manifest["step"], self.folder / name, manifest, self.rank, self.world)
            elif self.rank == 0:
                self.log(f"warning: checkpoint {name} is passed over: {problem}")

    def at_hint(self, hint: str) -> Found | None:
        """The checkpoint that `best` or `last` names, None where there is none or it is damaged."""
        if not (name := self._of_first(lambda: hinted(self.folder, hint))):
            return None
        folder = self.folder / name
        problem, manifest = self._problem(folder)
        return None if problem else Found(manifest["step"], folder, manifest, self.rank, self.world)

    def _problem(self, folder: Folder) -> tuple[str | None, dict[str, Any]]:
        """What is wrong with a checkpoint; the ranks share out the files and tell each other.

        Raises OSError on all ranks where one cannot ask the store: what is not seen now is not damaged.
        """
        # Read once: that of eight thousand ranks has megabytes, which each of them would ask for at the same moment.
        content, problem, unseen = self._of_first(partial(_manifest_of, folder))
        manifest: dict[str, Any] = {}
        if not problem:
            try:
                manifest = json.loads(content)
                if manifest["format"] not in (FORMAT, INDEXED):
                    return f"its format is {manifest['format']}, this version reads {FORMAT} and {INDEXED}", {}
                files = sorted(manifest["files"].items())[self.rank :: self.world]
                problem = next(filter(None, (check_file(folder, name, stated) for name, stated in files)), None)
            except (ValueError, KeyError, TypeError, OSError) as error:
                problem, unseen = _said_of(error, folder)
        # A rank whose own files are damaged must come here too, so what it found is a value and no exception.
        if self.group:
            # One that may be whole counts before one that is damaged, and then the first rank's.
            told = [(unseen is None, self.rank, problem, unseen)] if problem else []
            told = put_together(told, lambda one, other: sorted(one + other)[:1], self.group)
            _, _, problem, unseen = told[0] if told else (True, 0, None, None)
        if unseen:
            raise OSError(unseen)
        return problem, manifest

    def _of_first(self, ask: Callable[[], Answer]) -> Answer:
        """What rank 0 is answered, on all ranks: asked by each, a store could answer them differently. Raises OSError."""
        if not self.group:
            return ask()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = ask()
            except Exception as error:
                answer[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(answer, src=0, group=self.group)
        if answer[1]:
            raise OSError(answer[1])
        return answer[0]  # type: ignore[no-any-return]

    def load(self, found: Found, model: nn.Module, optimizer: Updater | None = None) -> None:
        """Fills the model and, where given, the optimiser, whatever number of workers wrote the checkpoint."""
        wanted: dict[str, torch.Tensor] = {}
        for name, parameter in own_parameters(model):
            into = _wanted(name, parameter, found.manifest["tensors"], optimizer)
            wanted |= {key: as_part(model, name, tensor) for key, tensor in into.items()}
        read(wanted, found.folder, found.manifest, self.rank, self.group)
        if optimizer is not None:
            for name, parameter in own_parameters(model):
                optimizer.load_state(parameter, _held(name, wanted, optimizer))


def _manifest_of(folder: Folder) -> tuple[bytes, str | None, str | None]:
    """A checkpoint's manifest as it lies there; or nothing, and what `_said_of` says of the reason."""
    try:
        return folder.read(MANIFEST), None, None
    except (ValueError, OSError) as error:
        return b"", *_said_of(error, folder)


def _said_of(error: Exception, folder: Folder) -> tuple[str, str | None]:
    """What is wrong with a checkpoint that could not be read; and where it may be whole, for all that is known, why."""
    unseen = f"{folder}: {error}" if folder.local is None and transient(error) else None
    return f"its manifest cannot be read ({error})", unseen


def named_tensors(model: nn.Module, optimizer: Updater) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by name: `model.<parameter>` and `optimizer.<parameter>.<state>`; tied ones once, and of
    adapters' base nothing.

    The model's part are the master copies where there are any. All workers call it together.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in own_parameters(model):
        held = dict(optimizer.state(parameter))
        tensors[f"model.{name}"] = as_part(model, name, held.pop("master", parameter.detach()))
        tensors |= {f"optimizer.{name}.{key}": as_part(model, name, value) for key, value in held.items()}
    return tensors


def _wanted(
    name: str, parameter: nn.Parameter, stored: dict[str, Any], optimizer: Updater | None
) -> dict[str, torch.Tensor]:
    """Where to read what a checkpoint has stored of a parameter: in place, or into what the optimiser then takes."""
    if optimizer is None:
        return {f"model.{name}": parameter.detach()}
    # A master is read into memory of its own: the parameter itself would round it to bfloat16.
    value = optimizer.empty_state(parameter, True, torch.float32) if optimizer.masters else parameter.detach()
    wanted = {f"model.{name}": value}
    for key in (key for key in stored if key.startswith(f"optimizer.{name}.")):
        of_its_size = bool(stored[key]["size"])
        wanted[key] = optimizer.empty_state(parameter, of_its_size, getattr(torch, stored[key]["dtype"]))
    return wanted


def _held(name: str, tensors: dict[str, torch.Tensor], optimizer: Updater) -> dict[str, torch.Tensor]:
    prefix = f"optimizer.{name}."
    held = {key.removeprefix(prefix): here(tensor) for key, tensor in tensors.items() if key.startswith(prefix)}
    return held | ({"master": here(tensors[f"model.{name}"])} if optimizer.masters else {})
