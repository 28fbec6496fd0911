"""Resuming a run: compares settings, data and machine with the previous attempt, and detects a complete run.

previous = read_previous_attempt(folder)                  # None for a new run
refuse_changes(previous, config)                          # raises SettingError, showing each difference
kept = keep_preparations(previous, context)               # its prepared data, even if the raw files have changed
describe_completion(previous, config)                     # "500 steps", or None if there is something left to do
accept_bits(folder / "checkpoints", bits, config.resume)  # train.exact: raises SettingError if the machine differs
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from shlex import quote
from typing import Any, TypeVar, cast

from raystride.pipelines.config import (
    Config,
    ModelConfig,
    ResumeConfig,
    SettingError,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.config.attempts import SETTINGS_FILE
from raystride.pipelines.config.base_model import can_be_read
from raystride.pipelines.config.mixture import defines_source
from raystride.pipelines.config.stored_run import put_attempt, read_run
from raystride.pipelines.data.prepare.fingerprint import (
    Identity,
    KeptPreparations,
    known_fingerprints,
    open_as_prepared,
)
from raystride.pipelines.data.prepare.manifest import load_finished_manifest
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.prepare.raw_files import (
    MAX_HASHED,
    describe_changed_files,
    find_changed_files,
    hash_raw_files,
    list_raw_files,
    read_raw_files,
    with_stamps,
)
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.selection import is_local
from raystride.pipelines.data.sources.source import Source
from raystride.pipelines.data.tasks import Task, build_task
from raystride.pipelines.launch.cluster.resources import Allocation
from raystride.pipelines.observability.record.environment import Environment
from raystride.pipelines.observability.record.journal import SUMMARY_FILE
from raystride.pipelines.observability.record.summary import RunSummary, read_summary
from raystride.pipelines.system.commands import launch_command
from raystride.pipelines.system.credentials import redact_all_uris
from raystride.pipelines.system.storage.folder import Folder, absolute_uri
from raystride.pipelines.train.checkpoint.layout import (
    BEFORE_PRODUCTS,
    checkpoint_names,
    newest_committed_step,
    parse_step,
    read_manifest,
)

S = TypeVar("S", ModelConfig, TokenizerConfig)
PATH_SETTINGS = ("data.source", "data.validation_source", "data.target_source", "tokenizer.file")
"""Settings that are paths of data: different spellings can mean the same."""
CHANGED_AT = "changed_at"
"""Key among a checkpoint's bit conditions: the steps after which they were others, by `resume.accept bits`."""
UNKNOWN_CHANGES = "files, or their time stamps: the preparation is gone, or of a version that did not note their content"
"""What `_find_data_changes` returns if it cannot tell."""


@dataclass(frozen=True)
class PreviousAttempt:
    """Stored state of the previous attempt of a run."""

    config: Config
    data: str | None
    """Fingerprint of its training data."""
    summary: RunSummary | None
    """Its summary, if it came to an end."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of a mixture's sources, by name, ended sources included."""
    learned: str = ""
    """Fingerprint of the facts learned from all sources together."""
    content: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the raw files' content by source name, "" for a single source; empty for runs of earlier versions."""
    code: Mapping[str, str] | None = None
    """Hashes of the files of its plug-ins and transforms, by their names; None for runs of 0.3, which have none."""
    own_model: Mapping[str, Any] = field(default_factory=dict)
    """Hashes of a user's own model: its `code`, and the `content` of its data by name; empty for runs of 0.3."""
    edits: Sequence[str] = field(default_factory=list)
    """Settings that differ in `config.yaml` since the attempt wrote it, a line each."""
    is_parent: bool = False
    """Whether it is of the run that a new one branches from (`train.branch_from`)."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of preparations by source name, "" for a single source."""
        return self.sources or ({"": self.data} if self.data else {})


def read_previous_attempt(folder: Folder) -> PreviousAttempt | None:
    """Returns the newest attempt of the run in this folder, None if there is none.

    Raises SettingError, and SealBroken for its summary, if it is damaged.
    """
    try:
        config, edits, environment = read_run(folder)
    except FileNotFoundError:
        return None
    return PreviousAttempt(
        config,
        environment.get("data"),
        cast(RunSummary, read_summary(folder)) or None,
        environment.get("sources", {}),
        environment.get("learned", ""),
        environment.get("content", {}),
        environment.get("code_sha256"),
        environment.get("own_model", {}),
        edits,
    )


def refuse_edits(previous: PreviousAttempt, resume: ResumeConfig, log: Callable[[str], None]) -> None:
    """Shows what was edited in `config.yaml` by hand. Raises SettingError unless `resume.edited` takes it."""
    if not previous.edits:
        return
    listed = f"{SETTINGS_FILE} was edited since this run wrote it:\n  " + "\n  ".join(previous.edits)
    if not resume.edited:
        raise SettingError(
            f"{listed}\n  take the change by --resume.edited true, or put the file back: the newest folder in attempts/ has "
            "a copy",
            setting="resume.edited",
            value=False,
            allowed=True,
        )
    log(listed)


def refuse_removed(folder: Folder) -> None:
    """Raises SettingError if the run to resume was removed before this driver owned it. Call it under the lease."""
    if not folder.exists(SETTINGS_FILE):
        raise SettingError(
            f"run {folder.name} was removed while this start looked at it: the same command begins it anew",
            setting="run",
            value=folder.name,
        )


def with_previous_base(previous: PreviousAttempt, config: Config) -> Config:
    """Returns the settings of a resumed run with the values of its base when it began: the family, which defines the names
    of adapters, and, if the base is gone, all settings of `model` and `tokenizer` that are at their defaults now.
    """
    before = previous.config
    model = replace(config.model, family=before.model.family)
    place = config.model.init_from
    if place and place == before.model.init_from and not can_be_read(place):
        model, tokenizer = _fill_defaults(model, before.model), _fill_defaults(config.tokenizer, before.tokenizer)
        return replace(config, model=model, tokenizer=tokenizer)
    return replace(config, model=model)


def _fill_defaults(section: S, before: S) -> S:
    """Returns a section in which settings at their defaults have their previous values."""
    kept = {item.name: getattr(before, item.name) for item in fields(section) if getattr(section, item.name) == item.default}
    return replace(section, **kept)


def refuse_changes(
    previous: PreviousAttempt,
    config: Config,
    data: Identity | None = None,
    has_same_data: Callable[[], bool] = lambda: False,
) -> None:
    """Raises SettingError if a fixed setting has changed, or the data behind the same settings; a mixture's sources may come
    and go.

    If only paths differ, `has_same_data` is called: it returns whether they hold the run's training data.
    """
    before, now = previous.config.fixed_settings(), config.fixed_settings()
    if previous.is_parent:
        del now["train.branch_from"]
    changed_paths = {key for key in now if _names_data_path(key) and _differs(before, now, key)}
    if changed_paths and (
        all(_normalize_path(before[key]) == _normalize_path(now[key]) for key in changed_paths) or data or has_same_data()
    ):
        before |= {key: now[key] for key in changed_paths}  # the content is compared, not the path
    earlier_values = {key: before[key] for key in now if before.get(key, now[key]) != now[key]}
    changed = [f"{key}: {value!r} before, {now[key]!r} now" for key, value in earlier_values.items()]
    if build_task(config).reads_dataset:  # `keep_preparations` has compared it; names of figures may change with its code
        data = None
    if data and previous.data and not data.is_compatible_with(previous.data, previous.sources):
        changed_sources = [
            name for name, fingerprint in data.sources.items() if previous.sources.get(name, fingerprint) != fingerprint
        ]
        label = f" of data.sources.{', '.join(changed_sources)}" if changed_sources else ""
        changed.append(f"the data{label}: fingerprint {previous.data[:12]} before, {data.data[:12]} now")
        earlier_values["data"] = previous.data
    if changed:
        first = next(iter(earlier_values))
        rule = (
            "this run cannot go on with other settings of these, start another with --run NAME, or go on with its own, as "
            f"{launch_command()} train --run {quote(config.run or 'NAME')} does by itself"
        )
        if previous.is_parent:
            rule = (
                f"train.branch_from is {config.train.branch_from!r}: a branch has data, model and slots of the run that it "
                "begins at, and may change schedule, rates and length. Give these as they are there"
            )
        raise SettingError(
            f"{rule}:\n  " + "\n  ".join(changed),
            setting=first,
            value=now.get(first, data.data if data else None),
            allowed=redact_all_uris(earlier_values),
        )


def keep_preparations(previous: PreviousAttempt, context: RunContext) -> KeptPreparations:
    """Returns the preparations with which a run resumes: all complete ones, whatever their raw files are now.

    Shows one line if raw files can be read and differ from those of a complete preparation. An incomplete preparation is
    kept if its raw files are the same. Raises DataError if they are not, or are gone.
    """
    kept: dict[str, str] = {}
    task = context.task
    for name, own, before in _known_preparations(previous, context):
        folder, label = context.storage / ".prepared" / before, f" of data.sources.{name}" if name else ""
        is_whole = load_finished_manifest(folder) is not None
        try:
            changes = _find_data_changes(own, task.under(own), folder, before, previous, name, check_all=not is_whole)
        except (DataError, SettingError, OSError) as error:
            if is_whole:  # the raw data is no longer needed
                kept[name] = before
                continue
            raise DataError(
                f"the prepared data{label} of this run is not whole in {folder}, and its raw data cannot be read: {error}",
                file=str(folder),
                settings=("data.source",),
            ) from error
        if changes and not is_whole:
            listed = "\n  ".join(changes)
            raise DataError(
                f"the prepared data{label} of this run is not whole in {folder}, and the raw files are not those that it "
                f"was made from. Put these back, or start another run with --run NAME:\n  {listed}",
                file=str(folder),
                settings=("data.source",),
            )
        if changes:
            context.notice(
                f"data: raw files{label} have changed since this run began ({describe_changed_files(changes)}); it goes on "
                "with what was prepared then. To train on the new data, give another --run NAME"
            )
        kept[name] = before
    config, before_all = context.config, str(previous.fingerprints.get(""))
    # What is followed is never whole, and goes on with the folder that it began with.
    if config.data.follow and before_all in known_fingerprints(config, task, *open_sources(config, task)):
        kept[""] = before_all
    return KeptPreparations(previous.learned, kept)


def _known_preparations(previous: PreviousAttempt, context: RunContext) -> Iterator[tuple[str, Config, str]]:
    """Yields name, settings and previous fingerprint of each source whose files were all there when the run began."""
    known = previous.config.by_source()
    for name, own in context.config.by_source().items() if not context.task.reads_dataset else ():
        if (before := previous.fingerprints.get(name)) is not None and name in known and not own.data.follow:
            yield name, own, before


def find_changed_preparations(previous: PreviousAttempt, context: RunContext) -> list[str]:
    """Returns how raw files differ from those that a run was trained on, a line each; none where that cannot be told."""
    task, found = context.task, list[str]()
    for name, own, before in _known_preparations(previous, context):
        folder = context.storage / ".prepared" / before
        with suppress(DataError, SettingError, OSError):
            changes = _find_data_changes(own, task.under(own), folder, before, previous, name, check_all=False)
            label = f"data.sources.{name}" if name else "data.source"
            found += [f"{label}: {change}" for change in changes if change != UNKNOWN_CHANGES]
    return found


def has_same_data(previous: PreviousAttempt, context: RunContext) -> bool:
    """Returns whether the paths of these settings hold the run's raw data, compared by content.

    Raises DataError, SettingError if a path cannot be read.
    """
    task = context.task
    return not any(
        _find_data_changes(
            own, task.under(own), context.storage / ".prepared" / before, before, previous, name, check_all=True
        )
        for name, own in context.config.by_source().items()
        if (before := previous.fingerprints.get(name)) is not None
    )


def _find_data_changes(
    own: Config, task: Task, folder: Folder, before: str, previous: PreviousAttempt, name: str, *, check_all: bool
) -> list[str]:
    """Returns the differences between raw data and that of the preparation `before` in `folder`, a line each."""
    source, validation = open_as_prepared(own, task, folder, previous.learned)
    if _matches(before, own, task, source, validation, previous.learned):
        return []
    changes = find_changed_files(folder, source, validation, max_hashed=MAX_HASHED if check_all else 256)
    if changes is None and previous.content.get(name) == hash_raw_files(list_raw_files(source, validation)):
        return []
    if changes is None:
        return [UNKNOWN_CHANGES]
    if changes:
        return changes
    known = {file.key: file.stamp for file in read_raw_files(folder) or ()}
    source, validation = with_stamps(source, validation, known)
    if not _matches(before, own, task, source, validation, previous.learned):
        return ["code of data.transforms or of a plug-in, or what it calls"]
    return []


def _matches(before: str, own: Config, task: Task, source: Source, validation: Source | None, learned: str) -> bool:
    """Returns whether a fingerprint is that of these sources, by the current rule or that of earlier versions."""
    return before in known_fingerprints(own, task, source, validation, learned)


def _names_data_path(key: str) -> bool:
    """Returns whether a setting is a path of data, also of a mixture's source."""
    last = key.rpartition(".")[2] if defines_source(key) else ""
    return key in PATH_SETTINGS or f"data.{last}" in PATH_SETTINGS


def _differs(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    return before.get(key) is not None and now.get(key) is not None and before[key] != now[key]


def _normalize_path(value: str) -> str:
    return absolute_uri(value) if is_local(value) else value


def describe_completion(previous: PreviousAttempt, train: TrainConfig, validation: ValidationConfig) -> str | None:
    """Returns the run's progress as text if there is nothing left to do with these settings, else None."""
    summary, previous_train = previous.summary, previous.config.train
    if not summary or summary.get("status") != "finished" or not summary.get("complete"):
        return None
    steps, reached = summary["steps"] or 0, f"{summary['steps']:,} steps"
    # A run with both limits ends by the first; if its steps ended it, its epochs may not be over.
    ended_by_steps = 0 < previous_train.steps <= steps
    is_over = 0 < train.steps <= steps or (not ended_by_steps and 0 < train.epochs <= previous_train.epochs)
    if summary.get("ending") == "stopped_early":
        is_over = validation == previous.config.validation
        reached += ", stopped early"
    return reached if is_over else None


def newest_step(folder: Folder) -> int | None:
    """Returns the step of a run's newest committed checkpoint, None if there is none."""
    return newest_committed_step(folder / "checkpoints")


def refuse_less(previous: PreviousAttempt, train: TrainConfig, run: str | None, saved: int | None) -> None:
    """Raises SettingError if a run is already past the requested steps, or has ended with more epochs.

    `saved` is the step of its newest checkpoint.
    """
    summary = previous.summary or {}
    reached = max(saved or 0, (summary.get("steps") or 0) if summary.get("complete") else 0)
    remedy = "give more, or start another with --run NAME (in Python run=)"
    if 0 < train.steps < reached:
        raise train.error("steps", f"must be at least {reached}, where run {run} is already: {remedy}")
    ended = (
        describe_completion(previous, previous.config.train, previous.config.validation)
        and not 0 < previous.config.train.steps <= reached
    )
    if ended and not train.steps and 0 < train.epochs < previous.config.train.epochs:
        least = previous.config.train.epochs
        raise train.error("epochs", f"must be at least {least:g}, with which run {run} has ended: {remedy}")


def describe_bit_dependencies(
    config: Config, environment: Environment, allocation: Allocation, before: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Returns the conditions, besides the fixed settings, for bitwise equal results; `environment` as in record.environment.

    `before` are those of the run's newest checkpoint, None if there is none. The bucket size is among them: the gradient's
    norm is computed from the buckets' norms.
    """
    names = [gpu["name"] for gpu in environment["gpus"][:1]] if allocation.device == "cuda" else [environment["cpu"]]
    versions = environment["versions"]
    return {
        "device": allocation.device,
        "device name": names[0] if names else None,
        "torch": versions.get("torch"),
        "triton": versions.get("triton") if allocation.device == "cuda" else None,
        "threads a worker": allocation.threads if allocation.device == "cpu" else None,
        "train.precision": "fp32" if config.train.precision == "auto" else config.train.precision,
        "train.stochastic_rounding": config.train.stochastic_rounding,
        "model.linear": config.model.linear,
        "products": _exact_matmul_backend(config.model, before) if allocation.device == "cpu" else None,
        "model.kernels": config.model.kernels,
        "scaling.bucket_mib": config.scaling.bucket_mib,
    }


def _exact_matmul_backend(model: ModelConfig, before: Mapping[str, object] | None) -> object:
    """Returns the matmul backend of an exact run on CPUs: the named one, the previous one, or PyTorch's for a new run."""
    named = model.linear if model.linear != "auto" else os.environ.get("RAYSTRIDE_LINEAR")
    return named or ("torch" if before is None else before.get("products", BEFORE_PRODUCTS))


def read_previous_bits(checkpoints: Folder, until: float = math.inf) -> tuple[str, dict[str, object] | None]:
    """Returns the name and the bit conditions of the newest checkpoint up to a step that has them; None if none has."""
    for name in reversed(checkpoint_names(checkpoints.names())):
        if (parse_step(name) or 0) > until:
            continue
        if (before := read_manifest(checkpoints / name).get("bits")) is not None:
            return name, before
    return "", None


def accept_bits(
    checkpoints: Folder, bits: Mapping[str, object], resume: ResumeConfig, until: float = math.inf
) -> dict[str, object]:
    """Returns the bit conditions of an exact run's next checkpoints: `bits`, and the steps after which they were others.

    `until`: the last step whose checkpoint counts. Raises SettingError if the newest was made under others and
    `resume.accept` is not `bits`.
    """
    name, before = read_previous_bits(checkpoints, until)
    known = before or {}
    # Conditions that an earlier version did not store have not changed since.
    changed = [key for key in bits if key in known and not _is_same(known[key], bits[key])]
    steps = cast(list[int], known.get(CHANGED_AT, []))
    if changed and resume.accept != "bits":
        lines = (f"{key}: {known[key]} before, {bits[key]} now" for key in changed)
        raise SettingError(
            f"train.exact is true, and from {name} on this run would not have the bits that it promises. Go on where "
            "these are as before, start another run with --run NAME, or go on with other bits by --resume.accept bits:\n  "
            + "\n  ".join(lines),
            setting="train.exact",
            value=True,
            allowed={key: known[key] for key in changed},
        )
    if changed:
        steps = [*steps, parse_step(name) or 0]
    return {**bits, CHANGED_AT: steps} if steps else dict(bits)


def _is_same(before: object, now: object) -> bool:
    """Returns whether conditions are equal; until 0.4 a version was without its build, as the 2.15.0 of 2.15.0+cu132."""
    return before == now or (isinstance(now, str) and "+" not in str(before) and before == now.partition("+")[0])


def write_settings(folder: Folder, attempt: str, config: Config, environment: Environment) -> None:
    """Stores the resolved settings and the environment of an attempt.

    Removes the previous attempt's summary: if this attempt were killed, that summary would be taken for its own.
    """
    folder.remove(SUMMARY_FILE)
    put_attempt(folder, attempt, config, environment)
