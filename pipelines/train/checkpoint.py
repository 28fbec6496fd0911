"""Checkpoints: saved in the background, found and verified at the start of an attempt, pruned as they age.

The newest valid manifest is the truth. `last` and `best` are hints for people; old checkpoints lose their data but keep
their manifests, so that the whole history of what was fed can be audited.

    checkpoints = Checkpoints(run / "checkpoints", attempt, keep=3, group=group)
    checkpoints.claim()                                       # whoever wrote here before writes no more
    checkpoints.save(model, optimizer, state, header)         # returns when parameters are copied
    found = checkpoints.newest()                              # step and manifest, or None
    checkpoints.load(found, model, optimizer)
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raystride.pipelines.files import Folder
from raystride.pipelines.train.names import MANIFEST, step_name
from raystride.pipelines.train.optimizer import Updater
from raystride.pipelines.train.staging import Staging
from raystride.pipelines.train.state import TrainState

Log = Callable[[str], None]
CLAIM = "attempt"
"""A file beside the checkpoints that says who may commit one."""
LINGER_S = 30.0
"""How long a save that is under way is waited for after an error."""


class Superseded(RuntimeError):
    """Another start of the run has begun since this one did."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole."""

    step: int
    folder: Folder
    manifest: dict[str, Any]
    rank: int = 0
    world: int = 1

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
        group: dist.ProcessGroup | None = None,
        log: Log = print,
        extra: dict[str, bytes] | None = None,
    ) -> None:
        self.folder, self.attempt, self.keep, self.group, self.log = folder, attempt, keep, group, log
        self.extra = extra or {}
        """Small files, by name, that every checkpoint holds: the tokenizer, the settings."""
        self.rank = dist.get_rank() if group else 0
        self.world = dist.get_world_size() if group else 1
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._committed: deque[int] = deque()
        self._claim = ""
        self._staging = Staging()

    def claim(self) -> None:
        """Lets no other group commit from here on. One that was given up and still writes learns of it, and ends."""
        if self.rank == 0:
            self._claim = f"{self.attempt} {secrets.token_hex(4)}\n"  # Ray's restarts of a group keep the attempt's name
            self.folder.put(CLAIM, self._claim)

    def _may_commit(self) -> None:
        # A group that stood still while the next one began, and then went on, would replace what that one has saved since.
        if self._claim and self.folder.read(CLAIM).decode() != self._claim:
            now = self.folder.read(CLAIM).decode().split()[0]
            raise Superseded(f"attempt {now} has taken this run over from {self.attempt}, which therefore ends")

    def save(self, model: nn.Module, optimizer: Updater, state: TrainState, header: dict[str, Any], *, best: bool) -> None:
        """Copies everything now and writes it in a thread. Waits first for the save before, and raises what that one met."""
        self.wait()
        tensors, arrived = self._staging.copy(named_tensors(model, optimizer))
        content = {
            **header,
            "world": self.world,
            "step": state.step,
            "parent_step": state.parent_step,
            "positions": [state.parent_position, state.position],
            "state": state.to_json(),
        }
        arguments = (tensors, arrived, self.path(state.step), content, state.step, state.fed_digest, best)
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
        """Waits for a save that is under way. Raises what it met."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            error, self._error = self._error, None
            raise error

    def wait_after_error(self) -> None:
        """After an error: a save that is under way may still end, but not hold up the process for ever.

        Where a worker was lost, two that remain could wait for each other: one in its save, the other in a step. Whoever
        ends first frees the other.
        """
        if self._thread:
            self._thread.join(LINGER_S)

    def _write(
        self,
        tensors: dict[str, torch.Tensor],
        arrived: Callable[[], None],
        folder: Folder,
        header: dict[str, Any],
        step: int,
        fed: int,
        best: bool,
    ) -> None:
        # A new thread has Python's lock and keeps it for 5 ms if it can; the loop, which waits for it, goes first.
        time.sleep(0.001)
        from raystride.pipelines.train.storage import CheckpointWriter, save

        try:
            arrived()
            writer = CheckpointWriter(folder, self.attempt, self.rank, header, fed, self.extra, self._may_commit)
            save(tensors, writer, self.group)
            self._committed.append(step)  # the coordinator answers its ranks when the manifest is there
            if self.rank == 0:
                self.folder.put("last", f"{step_name(step)}\n")
                if best:
                    self.folder.put("best", f"{step_name(step)}\n")
                self._prune(step_name(step))
        except BaseException as error:
            self._error = error

    def _prune(self, newest: str) -> None:
        """Removes data, never manifests, of all but the newest `keep` and the best, and what dead attempts left.

        Later steps than `newest`, which was just saved, are left alone: they were damaged when this attempt began, so they
        must not count, and this attempt will come to them.
        """
        best = self.folder.read("best").decode().strip() if self.folder.exists("best") else ""
        whole = [name for name in self.steps() if name <= newest]
        keep = {*whole[-self.keep :], best}
        for name in (name for name in self.folder.names() if name.startswith("step-") and name <= newest):
            folder = self.folder / name
            owner = _attempt_of(folder) if name in keep else None
            if name in keep and owner is None:
                continue  # damaged: nobody can say what belongs to it
            for inside in folder.names():
                if inside not in (MANIFEST, owner):
                    folder.remove(inside)
            if name not in whole:
                folder.remove()

    def steps(self) -> list[str]:
        """Names of the checkpoints that have a manifest, oldest first."""
        names = [name for name in self.folder.names() if name.startswith("step-")]
        return sorted(name for name in names if self.folder.exists(f"{name}/{MANIFEST}"))

    def newest(self) -> Found | None:
        """The newest checkpoint that is whole. All ranks get the same."""
        return next(self.whole(), None)

    def whole(self) -> Iterator[Found]:
        """The checkpoints that are whole, the newest first; those that are not are named and passed over."""
        for name in reversed(self.steps()):
            problem, manifest = self._problem(self.folder / name)
            if problem is None:
                yield Found(manifest["step"], self.folder / name, manifest, self.rank, self.world)
            elif self.rank == 0:
                self.log(f"warning: checkpoint {name} is passed over: {problem}")

    def at_hint(self, hint: str) -> Found | None:
        """The checkpoint that `best` or `last` names, None where there is none or it is damaged."""
        if not self.folder.exists(hint):
            return None
        folder = self.folder / self.folder.read(hint).decode().strip()
        problem, manifest = self._problem(folder)
        return None if problem else Found(manifest["step"], folder, manifest, self.rank, self.world)

    def _problem(self, folder: Folder) -> tuple[str | None, dict[str, Any]]:
        """What is wrong with a checkpoint; the ranks share out the files and tell each other."""
        from raystride.pipelines.train.storage import FORMAT, check_file

        try:
            manifest = folder.read_json(MANIFEST)
            if manifest["format"] != FORMAT:
                return f"its format is {manifest['format']}, this version reads {FORMAT}", {}
            files = sorted(manifest["files"].items())[self.rank :: self.world]
            problem = next(filter(None, (check_file(folder, name, stated) for name, stated in files)), None)
        except (ValueError, KeyError, TypeError, OSError) as error:
            problem, manifest = f"its manifest cannot be read ({error})", {}
        # A rank whose own files are damaged must come here too, so what it found is a value and no exception.
        if self.group:
            problems: list[str | None] = [None] * self.world
            dist.all_gather_object(problems, problem, group=self.group)
            problem = next(filter(None, problems), None)
        return problem, manifest

    def load(self, found: Found, model: nn.Module, optimizer: Updater | None = None) -> None:
        """Fills the model and, where given, the optimiser, whatever number of workers wrote the checkpoint."""
        from raystride.pipelines.train.storage import CheckpointReader, load

        wanted: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            wanted |= _wanted(name, parameter, found.manifest["tensors"], optimizer)
        load(wanted, CheckpointReader(found.folder, found.manifest), self.group)
        if optimizer is not None:
            for name, parameter in model.named_parameters():
                optimizer.load_state(parameter, _held(name, wanted, optimizer))


def _attempt_of(folder: Folder) -> str | None:
    """The attempt that a checkpoint's manifest names; None where it cannot be read."""
    try:
        return str(folder.read_json(MANIFEST)["attempt"])
    except (ValueError, KeyError, TypeError, OSError):
        return None


def named_tensors(model: nn.Module, optimizer: Updater) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by name: `model.<parameter>` and `optimizer.<parameter>.<state>`; tied ones once.

    The model's part are the master copies where there are any. All workers call it together.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        held = dict(optimizer.state(parameter))
        tensors[f"model.{name}"] = held.pop("master", parameter.detach())
        tensors |= {f"optimizer.{name}.{key}": value for key, value in held.items()}
    return tensors


def _wanted(
    name: str, parameter: nn.Parameter, stored: dict[str, Any], optimizer: Updater | None
) -> dict[str, torch.Tensor]:
    """Where to read what a checkpoint has stored of a parameter: in place, or into what the optimiser then takes."""
    if optimizer is None:
        return {f"model.{name}": parameter.detach()}
    size = stored[f"model.{name}"]["size"]
    # A master is read into memory of its own: the parameter itself would round it to bfloat16.
    value = optimizer.empty_state(parameter, size, torch.float32) if optimizer.masters else parameter.detach()
    wanted = {f"model.{name}": value}
    for key in (key for key in stored if key.startswith(f"optimizer.{name}.")):
        wanted[key] = optimizer.empty_state(parameter, stored[key]["size"], getattr(torch, stored[key]["dtype"]))
    return wanted


def _held(name: str, tensors: dict[str, torch.Tensor], optimizer: Updater) -> dict[str, torch.Tensor]:
    prefix = f"optimizer.{name}."
    held = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    return held | ({"master": tensors[f"model.{name}"]} if optimizer.masters else {})
