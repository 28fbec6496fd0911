"""Checkpoint manager: saves in the background, finds and verifies checkpoints at the start of an attempt, prunes old ones.

The newest valid manifest is authoritative. `last` and `best` are hints for people; old checkpoints lose their data but keep
their manifests, so that the whole history of fed samples can be audited. Complete local tensors are read directly, parts of
them by PyTorch Distributed Checkpoint.

    checkpoints = Checkpoints(run / "checkpoints", attempt, keep=3, group=group)
    checkpoints.fence_older_groups()                          # earlier writers can no longer commit
    checkpoints.save(model, optimizer, state, header, best=False)    # returns when parameters are copied
    checkpoints.finish()                                      # raises if the last one could not be written
    checkpoints.load_newest(checkpoints.find_newest(), model, optimizer)    # for any number of workers
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from raystride.pipelines.observability.record.state import SAVE_REFUSED
from raystride.pipelines.system.errors import SettingError, Unreadable, picklable_error
from raystride.pipelines.system.permit import Permit
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, parse_sealed
from raystride.pipelines.system.writer import WrittenByNewer
from raystride.pipelines.train.checkpoint.contents import (
    add_missing_buffers,
    join_tensors,
    load_extra_states,
    load_targets,
    loaded_state,
    named_tensors,
    refuse_unlike_numbers,
    trained_names,
    users_objects,
)
from raystride.pipelines.train.checkpoint.fence import AttemptSuperseded, Claim, check_claim, claim_checkpoints, commit_fence
from raystride.pipelines.train.checkpoint.layout import (
    MANIFEST_KEYS,
    OBJECTS,
    check_manifest,
    checkpoint_names,
    is_manifest,
    manifest_names,
    parse_step,
    step_name,
)
from raystride.pipelines.train.checkpoint.pieces import wrap_part
from raystride.pipelines.train.checkpoint.retention import best_name, data_folder, prune_checkpoints
from raystride.pipelines.train.checkpoint.staging import Staging
from raystride.pipelines.train.checkpoint.train_state import TrainState, Updater, UsersOptimizer
from raystride.pipelines.train.checkpoint.verify import FORMAT, INDEXED, MISSING, check_file, read_local, unreadable_error
from raystride.pipelines.train.distributed.collectives import all_reduce_object, first_failure
from raystride.pipelines.train.strategies.parameter_layout import saved_buffers, saved_parameters


def read(
    targets: dict[str, torch.Tensor],
    folder: Folder,
    manifest: dict[str, Any],
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fills the tensors, or this worker's parts of them if it is in a `group`. Raises OSError."""
    if group or not read_local(targets, folder, manifest):
        from raystride.pipelines.train.checkpoint.writer import CheckpointReader, load

        load(targets, CheckpointReader(folder, manifest, rank, targets))


Log = Callable[[str], None]
Answer = TypeVar("Answer")
MAX_LISTED_FAULTS = 10
"""Number of damaged checkpoints that a refusal names, the newest ones."""
NOTICE_S, MAX_NOTICE_S = 10.0, 60.0
"""Seconds of a wait for a save after which it is told, and the longest pause until it is told again."""
LINGER_S = 30.0
"""Seconds to wait for a running save after an error."""


@dataclass(frozen=True)
class ValidCheckpoint:
    """A complete checkpoint."""

    step: int
    folder: Folder
    manifest: dict[str, Any]
    rank: int = 0
    world: int = 1

    @property
    def data(self) -> Folder:
        """The folder of its files: tensors, tokenizers. Checkpoints of 0.1 name it after the attempt."""
        return self.folder / data_folder(self.manifest)

    @property
    def state(self) -> TrainState:
        """The loop's saved state, as this rank resumes from it.

        The old ranks' digests of fed samples are distributed over the current ranks, in case this step is saved again.
        """
        state = TrainState.from_json(self.manifest["state"])
        state.parent_step = self.manifest["parent_step"]
        state.parent_position = self.manifest.get("positions", [0])[0]
        fed = (int(digest, 16) for rank, digest in self.manifest["fed"].items() if int(rank) % self.world == self.rank)
        state.fed_digest, state.saved = sum(fed) % 2**64, True
        return state


@dataclass(frozen=True)
class _PendingSave:
    """A save that has begun, with its link to the previous checkpoint."""

    step: int
    parent_step: int
    parent_position: int
    fed_digest: int
    best: bool
    timed: bool = False
    """Whether it is due by the clock: if the store refuses it, the run goes on for as long as it would without it."""


class Checkpoints:
    """The checkpoints of a run, as seen by one rank. `group` is a separate process group, None for one worker.

    A save runs beside the training; its collectives on the training's own group would interleave with the gradients'.
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
        permit: Permit | None = None,
    ) -> None:
        """`term` is the driver's; see `checkpoint.fence`. `permit` is tested around each commit."""
        self.folder, self.attempt, self.keep, self.group, self.log = folder, attempt, keep, group, log
        self.term, self._permit = term, permit or Permit()
        self.failures = failures
        """Number of consecutive refused saves that ends the run."""
        self.extra = extra or {}
        """Small files, by name, in every checkpoint: the tokenizer, the settings."""
        self.rank = dist.get_rank() if group else 0
        self.world = dist.get_world_size() if group else 1
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._refusal: OSError | None = None
        """The store's error in the newest save, if the next one is to try again; equal on all ranks."""
        self._num_refused = 0
        """Number of consecutive refused saves."""
        self._newest: _PendingSave | None = None
        self._best = ""
        """The checkpoint that `best` must name next, "" if it is up to date."""
        self._warnings: deque[str] = deque()
        self._committed: deque[int] = deque()
        self._claim: Claim | None = None
        self.data = attempt
        self.verify_data: Callable[[], None] = lambda: None
        """Called before a checkpoint is written; it is not committed if this raises on any rank."""
        self.flush_record: Callable[[], object] = lambda: None
        """Called before a checkpoint is written: what was measured before it is to be recorded when it is there."""
        self.on_wait: Callable[[int, float], None] = lambda step, seconds: None
        """Called with step and seconds of a save that another one or the end has waited for, from `NOTICE_S` on, and with 0
        when it has ended."""
        self._staging = Staging()

    def fence_older_groups(self) -> None:
        """Prevents all other groups from committing; all ranks call it. A superseded group notices at its next commit, and
        ends.

        Raises AttemptSuperseded on all ranks if a later driver has claimed them.
        """
        # Ray restarts a group under the attempt's name; this random token distinguishes their claims and files.
        values = torch.tensor([secrets.randbits(32), 0, self.term])
        refusal = None
        if self.rank == 0:
            try:
                values[2] = claim_checkpoints(self.folder, Claim(self.attempt, f"{int(values[0]):08x}", self.term)).term
            except AttemptSuperseded as error:
                refusal, values[1] = error, 1
        if self.group:
            dist.broadcast(values, src=0, group=self.group)
        if values[1]:
            raise refusal or AttemptSuperseded(
                f"another driver has taken this run over from {self.attempt}, which therefore ends"
            )
        token = f"{int(values[0]):08x}"
        self.data = f"{self.attempt}-{token}"
        self._claim = Claim(self.attempt, token, int(values[2]))

    @contextmanager
    def _commit_fence(self) -> Iterator[None]:
        # A group that hung while the next one began, and then continued, would overwrite that one's checkpoints.
        with commit_fence(self.folder, self._claim) if self._claim else nullcontext():
            self._permit.check()
            yield

    def save(
        self,
        model: nn.Module,
        optimizer: Updater,
        state: TrainState,
        header: dict[str, Any],
        *,
        best: bool,
        timed: bool = False,
    ) -> None:
        """Copies everything now and writes it in a thread. Waits first for the previous save, as `wait_for_save` does.

        `timed`: due by the clock, so that its refusal does not count as one of `failures`.
        """
        self.wait_for_save()
        if (failed_save := self._newest) and self._refusal:
            # A missing checkpoint cannot be a parent: this one has the same parent, and the digests of both.
            if failed_save.step == state.step:
                best = best or failed_save.best
            elif state.parent_step == failed_save.step:
                state.parent_step, state.parent_position = failed_save.parent_step, failed_save.parent_position
                state.fed_digest = (state.fed_digest + failed_save.fed_digest) % 2**64
        self._newest = _PendingSave(state.step, state.parent_step, state.parent_position, state.fed_digest, best, timed)
        if self.group:
            refuse_unlike_numbers(model, optimizer, self.group)
        objects, of_objects = users_objects(model, optimizer)
        tensors, wait_for_copies = self._staging.copy_tensors(named_tensors(model, optimizer) | of_objects)
        content = {
            **header,
            **({OBJECTS: objects} if objects["dict"] else {}),
            "world": self.world,
            "step": state.step,
            "parent_step": state.parent_step,
            "positions": [state.parent_position, state.position],
            "state": state.to_json(),
        }
        arguments = (tensors, wait_for_copies, content, self._newest)
        self._thread = threading.Thread(target=self._write_checkpoint, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        # A validation may save this step again; that checkpoint has the same parent as this one.
        state.saved = True

    def step_folder(self, step: int) -> Folder:
        """Returns the folder of a step's checkpoint, existing or not."""
        return self.folder / step_name(step)

    def is_saving(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def take_committed_steps(self) -> Iterator[int]:
        """Yields the steps committed since the last call. Does not wait."""
        while self._committed:
            yield self._committed.popleft()

    def wait_for_save(self) -> None:
        """Waits for a running save. If the store refused it, logs a warning, and the next save tries again.

        Raises its error after too many refused saves in a row, at once if it is not the store's fault. All ranks know the
        outcome of each save and call this at the same step, so they decide alike.
        """
        if self._thread:
            self._join_save(self._thread)
            self._thread = None
            if self._refusal is None:
                self._num_refused = 0
            elif self._newest:
                self._num_refused += not self._newest.timed
                count = f"{self._num_refused} in a row, {self.failures} end the run"
                count = "the next one tries again" if self._newest.timed else count
                problem = f"{type(self._refusal).__name__}: {self._refusal}"
                self._warnings.append(f"{SAVE_REFUSED}{self._newest.step} could not be written ({problem}); {count}")
        while self._warnings:
            note = self._warnings.popleft()
            if self.rank == 0:
                self.log(f"warning: {note}")
        if self._error:
            error, self._error = self._error, None
            raise error
        if self._refusal and self._num_refused >= self.failures:
            raise self._refusal

    def _join_save(self, thread: threading.Thread) -> None:
        """Waits for the end of a save, and tells `on_wait` if that takes long."""
        began, pause = time.monotonic(), NOTICE_S
        step = self._newest.step if self._newest else 0
        thread.join(pause)
        has_waited = thread.is_alive()
        while thread.is_alive():
            self.on_wait(step, time.monotonic() - began)
            pause = min(2 * pause, MAX_NOTICE_S)
            thread.join(pause)
        if has_waited:
            self.on_wait(step, 0.0)

    @property
    def has_refused_save(self) -> bool:
        """Whether the newest save could not be written, as of the last `wait_for_save`."""
        return self._refusal is not None and self._thread is None

    def finish(self) -> None:
        """Waits for the last save of the run. Raises its error."""
        self.wait_for_save()
        if self._refusal:
            raise self._refusal

    def wait_after_error(self) -> None:
        """After an error, waits for a running save, but not for ever.

        If a worker was lost, two remaining ones could wait for each other: one in its save, the other in a step. The first
        to end frees the other.
        """
        if self._thread:
            self._thread.join(LINGER_S)

    def _write_checkpoint(
        self,
        tensors: dict[str, torch.Tensor],
        wait_for_copies: Callable[[], None],
        header: dict[str, Any],
        pending_save: _PendingSave,
    ) -> None:
        # A new thread may keep Python's lock for 5 ms; the loop, which waits for it, goes first.
        time.sleep(0.001)
        from raystride.pipelines.train.checkpoint import index
        from raystride.pipelines.train.checkpoint.writer import CheckpointSaveError, CheckpointWriter, save

        def finish_copies() -> None:
            wait_for_copies()
            self.verify_data()
            self.flush_record()

        names = self.step_folder(pending_save.step), self.attempt, self.data
        term = self._claim.term if self._claim else 0
        options = self._commit_fence, finish_copies, self.world > index.MAX_LISTED_RANKS
        writer = CheckpointWriter(*names, self.rank, header, pending_save.fed_digest, self.extra, *options, term)
        try:
            save(tensors, writer, self.group)
            self._refusal = None
            self._committed.append(pending_save.step)  # the coordinator replies to its ranks after the manifest is written
            if self.rank == 0:
                self._update_hints_and_prune(step_name(pending_save.step), pending_save.best)
        except CheckpointSaveError as save_error:
            if isinstance(save_error.cause, OSError):
                self._refusal = save_error.cause
            else:
                self._error = save_error.cause
        except BaseException as error:
            self._error = error

    def _update_hints_and_prune(self, name: str, best: bool) -> None:
        """Updates the hints and prunes after a commit; if it fails, the next commit repeats it."""
        self._best = name if best else self._best
        try:
            if self._claim:
                check_claim(self.folder, self._claim)
            self._permit.check()
            self.folder.put("last", f"{name}\n")
            if self._best:
                self.folder.put("best", f"{self._best}\n")
                self._best = ""
            prune_checkpoints(self.folder, name, self.keep, self.data)
        except Exception as error:
            self._warnings.append(f"what checkpoint {name} replaces could not be cleared ({type(error).__name__}: {error})")

    def list_names(self) -> list[str]:
        """Returns the names of the checkpoints with a manifest, oldest first; one listing."""
        found = (file.partition("/") for file in self.folder.sizes())
        return checkpoint_names(name for name, _, inside in found if is_manifest(inside))

    def find_newest(self) -> ValidCheckpoint | None:
        """Returns the newest complete checkpoint, equal on all ranks; None if the run has no manifest.

        Raises SettingError if it has manifests, and no complete checkpoint; Unreadable.
        """
        faults: dict[str, str] = {}
        if (newest := next(self.find_whole(faults), None)) or not faults:
            return newest
        listed = [f"{name}: {fault}" for name, fault in faults.items()]
        if len(listed) > MAX_LISTED_FAULTS:
            listed[MAX_LISTED_FAULTS:] = [f"and {len(listed) - MAX_LISTED_FAULTS} older ones"]
        run = self.folder.parent.name
        raise SettingError(
            f"run {run} has {len(faults)} checkpoint(s), and none that is whole:\n  " + "\n  ".join(listed) + "\n"
            "  a training begins anew under another name (--run NAME), or under this one by --launch.start_over true, which "
            "moves the checkpoints aside and deletes nothing",
            setting="run",
            value=run,
        )

    def find_whole(self, faults: dict[str, str] | None = None, before: int | None = None) -> Iterator[ValidCheckpoint]:
        """Yields the complete checkpoints, newest first, of steps below `before` if it is given; logs and skips others.

        `faults` receives the names of those with their faults. Raises Unreadable: such a checkpoint may be complete.
        """
        for name in reversed(self._ask_rank_0(self.list_names)):
            if before is not None and (parse_step(name) or 0) >= before:
                continue
            problem, manifest = self._find_problem(self.folder / name)
            if problem is None:
                yield ValidCheckpoint(manifest["step"], self.folder / name, manifest, self.rank, self.world)
                continue
            if faults is not None:
                faults[name] = problem
            if self.rank == 0:
                self.log(f"warning: checkpoint {name} is passed over: {problem}")

    def find_best(self) -> ValidCheckpoint | None:
        """Returns the best checkpoint by the newest manifest, None if nothing was validated.

        Raises SettingError if that checkpoint is not complete: another one is not what was asked for. Raises Unreadable.
        """
        name = self._ask_rank_0(lambda: best_name(self.folder))
        while name:
            problem, manifest = self._find_problem(self.folder / name)
            if problem is None:
                return ValidCheckpoint(manifest["step"], self.folder / name, manifest, self.rank, self.world)
            before, name = name, self._ask_rank_0(lambda: best_name(self.folder))
            if name == before:  # else the run went on, and removed what it no longer needs
                raise self._unusable_error(f"best, {name},", problem, "best")
        return None

    def find_step(self, step: int, setting: str = "checkpoint") -> ValidCheckpoint:
        """Returns the checkpoint of a step. Raises SettingError, for the setting that names it, if it is not complete, and
        Unreadable."""
        folder = self.step_folder(step)
        problem, manifest = self._find_problem(folder)
        if problem:
            raise self._unusable_error(f"{step}, {folder.name},", problem, step, setting)
        return ValidCheckpoint(step, folder, manifest, self.rank, self.world)

    def _unusable_error(self, named: str, problem: str, value: str | int, setting: str = "checkpoint") -> SettingError:
        """Returns the error for a checkpoint that was named; it lists the steps whose data is there, by one listing."""
        files = (file.split("/") for file in self._ask_rank_0(self.folder.sizes))
        with_data = checkpoint_names({parts[0] for parts in files if len(parts) > 2} & {*self._ask_rank_0(self.list_names)})
        steps = [str(parse_step(name)) for name in with_data]
        last = ": --checkpoint last is the newest that is whole" if setting == "checkpoint" else f", by --{setting}"
        return SettingError(
            f"checkpoint {named} of run {self.folder.parent.name} cannot be used: {problem}. Another one is taken only by "
            f"name{last}; there is data of steps {', '.join(steps) or 'none'}",
            setting=setting,
            value=value,
            allowed=("last", *steps),
        )

    def _find_problem(self, folder: Folder) -> tuple[str | None, dict[str, Any]]:
        """Returns a checkpoint's problem, if any, and its manifest; the ranks share out the files and exchange results.

        Raises Unreadable on all ranks if one cannot read a file: it may be complete. Raises WrittenByNewer on all ranks.
        """
        first, previous = None, b""
        for name in self._ask_rank_0(lambda: manifest_names(folder)):
            # Read once: the manifest of eight thousand ranks has megabytes, and each of them would request it at once.
            content, problem = self._ask_rank_0(partial(_read_bytes, folder, name))
            if problem or content != previous:  # the copy for 0.3 has the same faults
                problem, manifest = self._check_manifest(folder, name, content, problem)
                if problem is None:
                    return None, manifest
                previous = content if manifest else previous
            first = first or problem
        return first or "it has no MANIFEST.json that this run has written", {}

    def _check_manifest(
        self, folder: Folder, name: str, content: bytes, problem: str | None
    ) -> tuple[str | None, dict[str, Any]]:
        """Returns the problem of one manifest of a checkpoint or of its files, as `_find_problem` does, and its content.

        `problem` is that of reading it.
        """
        manifest: dict[str, Any] = {}
        unreadable: str | None = None
        if not problem:
            try:
                parsed = parse_sealed(content, "its manifest", MANIFEST_KEYS)
                check_manifest(parsed, folder, name)
                manifest = parsed
                if manifest["format"] not in (FORMAT, INDEXED):
                    return f"its format is {manifest['format']}, this version reads {FORMAT} and {INDEXED}", {}
                int(manifest["step"])
                files = sorted(manifest["files"].items())[self.rank :: self.world]
                problem = next(filter(None, (check_file(folder, name, stated) for name, stated in files)), None)
            except WrittenByNewer as error:  # on all ranks: they have the same content
                raise WrittenByNewer(f"checkpoint {folder}: {error}", setting=error.setting, value=error.value) from None
            except SealBroken as error:
                problem = str(error)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"its manifest cannot be read ({type(error).__name__}: {error})"
            except Unreadable as error:
                problem = unreadable = str(error)
        # A rank with damaged files must also take part, so its result is a value and not an exception.
        if self.group:
            # Unreadable takes precedence over damaged, and then the first rank's problem counts.
            problems = [(unreadable is None, self.rank, problem, unreadable)] if problem else []
            problems = all_reduce_object(problems, lambda one, other: sorted(one + other)[:1], self.group)
            _, _, problem, unreadable = problems[0] if problems else (True, 0, None, None)
        if unreadable:
            raise Unreadable(unreadable)
        return problem, manifest

    def _ask_rank_0(self, ask: Callable[[], Answer]) -> Answer:
        """Broadcasts rank 0's answer: asked by each rank, a store could answer differently. Raises Unreadable."""
        reply: list[Any] = [None, None]
        if self.rank == 0:
            try:
                reply[0] = ask()
            except Exception as error:
                if not (self.group or isinstance(error, OSError)):
                    raise
                reply[1] = str(unreadable_error(self.folder, error))
        if self.group:
            dist.broadcast_object_list(reply, src=0, group=self.group)
        if reply[1]:
            raise Unreadable(reply[1])
        return reply[0]  # type: ignore[no-any-return]

    def load_newest(self, found: ValidCheckpoint, model: nn.Module, optimizer: Updater | None = None) -> ValidCheckpoint:
        """Fills the model from `found`, or if that fails from the newest complete one before it; returns the one loaded.

        Says so in a line. Raises the error of `found` if none can be loaded; Unreadable, and errors of memory, at once:
        those are not the checkpoint's.
        """
        first = error = self._try_load(found, model, optimizer)
        while error:
            if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
                raise error
            if isinstance(error, OSError) and not isinstance(error, MISSING):
                raise unreadable_error(found.folder, error) from error
            earlier = next(self.find_whole(before=found.step), None)
            if earlier is None:
                raise first or error
            if self.rank == 0:
                problem = f"{type(error).__name__}: {error}"
                self.log(
                    f"warning: checkpoint {found.folder.name} cannot be loaded ({problem}); {earlier.folder.name} is instead"
                )
            found = earlier
            error = self._try_load(found, model, optimizer)
        return found

    def load(self, found: ValidCheckpoint, model: nn.Module, optimizer: Updater | None = None) -> None:
        """Fills the model and optionally the optimiser, whatever number of workers wrote the checkpoint. Raises the first
        rank's error on all ranks.
        """
        if error := self._try_load(found, model, optimizer):
            raise error

    def _try_load(self, found: ValidCheckpoint, model: nn.Module, optimizer: Updater | None) -> Exception | None:
        """Loads as `load` does; returns the first rank's error, equal on all ranks, or None."""
        wanted: dict[str, torch.Tensor] = {}
        saves_buffers = getattr(model, "saves_buffers", False)

        def fill() -> None:
            stored = found.manifest["tensors"]
            add_missing_buffers(model, stored)
            for name, parameter in saved_parameters(model):
                if not parameter.requires_grad and f"model.{name}" not in stored:  # by an earlier version
                    continue
                targets = load_targets(name, parameter, stored, optimizer if parameter.requires_grad else None)
                wanted.update({key: wrap_part(model, name, tensor) for key, tensor in targets.items()})
            wanted.update({f"model.{name}": buffer for name, buffer in saved_buffers(model)})
            for name in (name for name in stored if name.startswith(f"{OBJECTS}.") and saves_buffers):
                wanted[name] = torch.zeros(stored[name]["size"], dtype=getattr(torch, stored[name]["dtype"]))
            read(wanted, found.folder, found.manifest, self.rank, self.group)
            if optimizer:
                _ = found.state  # raises if the loop's state is not one

        def fill_optimizer() -> None:
            for name, parameter in saved_parameters(model):
                if optimizer and parameter.requires_grad:
                    optimizer.load_state(parameter, loaded_state(name, wanted, optimizer))
            objects = join_tensors(found.manifest.get(OBJECTS), wanted) or {}
            if isinstance(optimizer, UsersOptimizer) and "optimizer" in objects:
                optimizer.load_plain_state(objects["optimizer"], trained_names(model))
            load_extra_states(model, objects.get("modules", {}))

        # What the optimiser does may be collective, so all ranks agree first that each has read its part.
        return self._attempt(fill) or self._attempt(fill_optimizer)

    def _attempt(self, work: Callable[[], None]) -> Exception | None:
        """Returns the first error that `work` raises on any rank, equal on all ranks; None if all succeed."""
        failures: dict[int, BaseException] = {}
        try:
            work()
        except Exception as error:
            if not self.group:
                return error
            failures[self.rank] = picklable_error(error)
        if self.group:
            failures = all_reduce_object(failures, lambda one, other: one | other, self.group)
        return first_failure(failures, self.world) if failures else None  # type: ignore[return-value]


def _read_bytes(folder: Folder, name: str) -> tuple[bytes, str | None]:
    """Returns a checkpoint's manifest as stored, or b"" and its problem. Raises OSError."""
    try:
        return folder.read(name), None
    except MISSING as error:
        return b"", f"its manifest cannot be read ({error})"
