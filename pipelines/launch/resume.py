"""Starting a run's name again: what may differ, what may not, and when there is nothing left to do.

earlier = read_earlier(folder)                            # None for a new run
refuse_changes(earlier, config)                           # raises SettingError, showing each difference
kept = keep_preparations(earlier, config, storage, log)   # its data, whatever became of the raw files
completed(earlier, config)                                # "my-run is complete: 500 steps ..." or None
refuse_other_bits(folder / "checkpoints", bits)           # train.exact: raises SettingError where another machine is one
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from shlex import quote
from typing import Any, cast

from yaml import YAMLError

from raystride.pipelines.cluster.resources import Share
from raystride.pipelines.commands import program
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.mixture import defines_source
from raystride.pipelines.config.parse import from_yaml, to_yaml
from raystride.pipelines.credentials import masked_all
from raystride.pipelines.files import Folder, absolute
from raystride.pipelines.prepare.fingerprint import Identity, Kept, fingerprint_of, open_sources
from raystride.pipelines.prepare.one_source import finished
from raystride.pipelines.prepare.raw_files import (
    MAX_HASHED,
    describe_changes,
    find_changed_files,
    hash_raw_files,
    list_raw_files,
    read_raw_files,
    with_stamps,
)
from raystride.pipelines.record.environment import Environment
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sources.source import Source
from raystride.pipelines.tasks import Task, build_task
from raystride.pipelines.train.names import BEFORE_PRODUCTS, MANIFEST, checkpoint_names, step_name, step_of

PLACES = ("data.source", "data.validation_source", "data.target_source", "tokenizer.file")
"""Settings that name where data lies: written differently, they mean the same."""
SETTINGS = "config.yaml"
ENVIRONMENT = "environment.json"


@dataclass(frozen=True)
class Earlier:
    """What an earlier attempt left behind."""

    config: Config
    data: str | None
    """Fingerprint of the data that it trained on."""
    summary: RunSummary | None
    """Its summary, where it came to an end."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of a mixture's sources, by name; of those that have ended, too."""
    learned: str = ""
    """Fingerprint of what was learned from these together."""
    content: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the raw files' content by the names of sources, "" for the only one; empty: of an earlier version."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of preparations by the names of sources, "" for the only one."""
        return self.sources or ({"": self.data} if self.data else {})


def read_earlier(folder: Folder) -> Earlier | None:
    """The newest earlier attempt of the run in this folder, None if there is none. Raises SettingError if it is damaged."""
    if not folder.exists(SETTINGS):
        return None
    try:
        config = from_yaml(Config, folder.read(SETTINGS).decode())
    except (ValueError, TypeError, AttributeError, YAMLError) as error:
        raise SettingError(
            f"{folder / SETTINGS} of the earlier attempt cannot be read ({error}): use another --run",
            setting="run",
            value=folder.name,
        ) from None
    there, summary = _json(folder, ENVIRONMENT), cast(RunSummary, _json(folder, "summary.json")) or None
    return Earlier(
        config, there.get("data"), summary, there.get("sources", {}), there.get("learned", ""), there.get("content", {})
    )


def _json(folder: Folder, name: str) -> dict[str, Any]:
    try:
        return dict(folder.read_json(name))
    except (FileNotFoundError, ValueError):
        return {}


def refuse_changes(
    earlier: Earlier, config: Config, data: Identity | None = None, same_data: Callable[[], bool] = lambda: False
) -> None:
    """Raises SettingError where a setting that may not change did, or the data behind the same settings; a mixture's
    sources may come and go.

    `same_data` is asked where places are all that differs: whether what lies there is what the run trained on.
    """
    before, now = earlier.config.fixed(), config.fixed()
    places = {key for key in now if _names_place(key) and _differs(before, now, key)}
    if places and (all(_place(before[key]) == _place(now[key]) for key in places) or data or same_data()):
        before |= {key: now[key] for key in places}  # what lies there is compared, wherever it is
    earlier_values = {key: before[key] for key in now if before.get(key, now[key]) != now[key]}
    changed = [f"{key}: {value!r} before, {now[key]!r} now" for key, value in earlier_values.items()]
    if data and earlier.data and not data.goes_on(earlier.data, earlier.sources):
        other = [name for name, each in data.sources.items() if earlier.sources.get(name, each) != each]
        of = f" of data.sources.{', '.join(other)}" if other else ""
        changed.append(f"the data{of}: fingerprint {earlier.data[:12]} before, {data.data[:12]} now")
        earlier_values["data"] = earlier.data
    if changed:
        first = next(iter(earlier_values))
        raise SettingError(
            "this run cannot go on with other settings of these, start another with --run NAME, or go on with its own, as "
            f"{program()} train --run {quote(config.run or 'NAME')} does by itself:\n  " + "\n  ".join(changed),
            setting=first,
            value=now.get(first, data.data if data else None),
            allowed=masked_all(earlier_values),
        )


def keep_preparations(earlier: Earlier, config: Config, storage: Folder, log: Callable[[str], None]) -> Kept:
    """Returns the preparations with which a run goes on: all that are whole, whatever their raw files are now.

    If raw files can be read and differ from those of a whole preparation, one line says so. A preparation that is not whole
    is kept if its raw files are the same. Raises DataError if they are not, or are gone.
    """
    kept: dict[str, str] = {}
    task = build_task(config)
    for name, own in config.by_source().items():
        before, came_back = earlier.fingerprints.get(name), name not in earlier.config.by_source()
        if before is None or came_back or own.data.follow:
            continue
        folder, of = storage / ".prepared" / before, f" of data.sources.{name}" if name else ""
        whole = finished(folder) is not None
        try:
            changes = _data_changes(own, task.under(own), folder, before, earlier, name, check_all=not whole)
        except (DataError, SettingError, OSError) as error:
            if whole:  # nothing of it is needed any more
                kept[name] = before
                continue
            raise DataError(
                f"the prepared data{of} of this run is not whole in {folder}, and its raw data cannot be read: {error}",
                file=str(folder),
                settings=("data.source",),
            ) from error
        if changes and not whole:
            listed = "\n  ".join(changes)
            raise DataError(
                f"the prepared data{of} of this run is not whole in {folder}, and the raw files are not those that it was "
                f"made from. Put these back, or start another run with --run NAME:\n  {listed}",
                file=str(folder),
                settings=("data.source",),
            )
        if changes:
            log(
                f"data: raw files{of} have changed since this run began ({describe_changes(changes)}); it goes on with what "
                "was prepared then. To train on the new data, give another --run NAME"
            )
        kept[name] = before
    return Kept(earlier.learned, kept)


def same_data(earlier: Earlier, config: Config, storage: Folder) -> bool:
    """Returns whether the places of these settings hold the data that the run was prepared from, by its content.

    Raises DataError, SettingError if a place cannot be read.
    """
    task = build_task(config)
    return not any(
        _data_changes(own, task.under(own), storage / ".prepared" / before, before, earlier, name, check_all=True)
        for name, own in config.by_source().items()
        if (before := earlier.fingerprints.get(name)) is not None
    )


def _data_changes(
    own: Config, task: Task, folder: Folder, before: str, earlier: Earlier, name: str, *, check_all: bool
) -> list[str]:
    """Returns how raw data differs from what the preparation `before` in `folder` was made of, a line a difference."""
    source, validation = open_sources(own, task)
    if _fits(before, own, task, source, validation, earlier.learned):
        return []
    changes = find_changed_files(folder, source, validation, max_hashed=MAX_HASHED if check_all else 256)
    if changes is None and earlier.content.get(name) == hash_raw_files(list_raw_files(source, validation)):
        return []
    if changes is None:
        return ["files, or their time stamps: the preparation is gone, or of a version that did not note their content"]
    if changes:
        return changes
    known = {file.key: file.stamp for file in read_raw_files(folder) or ()}
    source, validation = with_stamps(source, validation, known)
    if not _fits(before, own, task, source, validation, earlier.learned):
        return ["code of data.steps or of a plug-in, or what it calls"]
    return []


def _fits(before: str, own: Config, task: Task, source: Source, validation: Source | None, learned: str) -> bool:
    """Whether a fingerprint is that of these sources, by today's rule or by that of earlier versions."""
    of = partial(fingerprint_of, own, task, source, validation, learned)
    return before in (of(), of(with_code=False))


def _names_place(key: str) -> bool:
    """Whether a setting's value names a place where data lies, for a source of a mixture as well."""
    last = key.rpartition(".")[2] if defines_source(key) else ""
    return key in PLACES or f"data.{last}" in PLACES


def _differs(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    return before.get(key) is not None and now.get(key) is not None and before[key] != now[key]


def _place(value: str) -> str:
    return absolute(value) if os.path.exists(os.path.expanduser(value)) else value


def completed(earlier: Earlier, config: Config) -> str | None:
    """How far the run came if there is nothing left to do under these settings, else None."""
    summary, train, then = earlier.summary, config.train, earlier.config.train
    if not summary or summary.get("status") != "finished" or not summary.get("complete"):
        return None
    steps, reached = summary["steps"] or 0, f"{summary['steps']:,} steps"
    # A run with both ends by whichever comes first; if its steps ended it, its epochs may not be over.
    ended_by_steps = 0 < then.steps <= steps
    over = 0 < train.steps <= steps or (not ended_by_steps and 0 < train.epochs <= then.epochs)
    if summary.get("ending") == "stopped_early":
        over = config.validation == earlier.config.validation
        reached += ", stopped early"
    return reached if over else None


def newest_step(folder: Folder) -> int | None:
    """The step of the newest checkpoint that was committed; None where there is none."""
    checkpoints = folder / "checkpoints"
    names = reversed(checkpoint_names(checkpoints.names()))
    return next((step_of(name) for name in names if checkpoints.exists(f"{name}/{MANIFEST}")), None)


def newest_manifest(folder: Folder) -> dict[str, Any]:
    """What the newest checkpoint of a run says of itself; empty where there is none."""
    step = newest_step(folder)
    return {} if step is None else _json(folder / "checkpoints" / step_name(step), MANIFEST)


def refuse_fewer_steps(config: Config, reached: int | None) -> None:
    """Raises SettingError where a run that is to go on is past its end already."""
    if reached and 0 < config.train.steps < reached:
        raise config.train.error(
            "steps",
            f"must be at least {reached}, where run {config.run} is already: give more, or start another with --run NAME",
        )


def what_bits_depend_on(
    config: Config, environment: Environment, share: Share, before: Mapping[str, object] | None = None
) -> dict[str, object]:
    """What must be the same, besides the fixed settings, for the same bits; `environment` as record.environment tells it.

    `before` is what the run's newest checkpoint says of them, None where there is none. The size of buckets is among them:
    the gradient's norm is that of the buckets' norms.
    """
    names = [gpu["name"] for gpu in environment["gpus"][:1]] if share.device == "cuda" else [environment["cpu"]]
    versions = environment["versions"]
    return {
        "device": share.device,
        "device name": names[0] if names else None,
        "torch": versions.get("torch"),
        "triton": versions.get("triton") if share.device == "cuda" else None,
        "threads a worker": share.threads if share.device == "cpu" else None,
        "train.precision": "fp32" if config.train.precision == "auto" else config.train.precision,
        "train.stochastic_rounding": config.train.stochastic_rounding,
        "model.linear": config.model.linear,
        "products": _exact_products(config, before) if share.device == "cpu" else None,
        "model.kernels": config.model.kernels,
        "scaling.bucket_mib": config.scaling.bucket_mib,
    }


def _exact_products(config: Config, before: Mapping[str, object] | None) -> object:
    """Which way an exact run's linear products go on CPUs: as they went, and in a new one by PyTorch unless one is named."""
    named = config.model.linear if config.model.linear != "auto" else os.environ.get("RAYSTRIDE_LINEAR")
    return named or ("torch" if before is None else before.get("products", BEFORE_PRODUCTS))


def bits_before(checkpoints: Folder) -> tuple[str, dict[str, object] | None]:
    """The newest checkpoint of a run that says what its bits depend on, by name, and what it says; None where none does."""
    for name in reversed(checkpoint_names(checkpoints.names())):
        if (before := _json(checkpoints / name, MANIFEST).get("bits")) is not None:
            return name, before
    return "", None


def refuse_other_bits(checkpoints: Folder, bits: Mapping[str, object]) -> None:
    """Raises SettingError where the newest checkpoint of an exact run was made under what gives other bits."""
    name, before = bits_before(checkpoints)
    # What an earlier version did not write down is what it was then.
    common = [key for key in bits if key in (before or {})]
    changed = [f"{key}: {before[key]} before, {bits[key]} now" for key in common if before and before[key] != bits[key]]
    if changed:
        raise SettingError(
            f"train.exact is true, and from {name} on this run would not have the bits that it promises. Go on where "
            "these are as before, or start another run with --run NAME:\n  " + "\n  ".join(changed),
            setting="train.exact",
            value=True,
            allowed={key: before[key] for key in common if before and before[key] != bits[key]},
        )


def write_settings(folder: Folder, attempt: str, config: Config, environment: Environment) -> None:
    """Keeps the resolved settings of every attempt, and where it ran; the newest also under the plain names.

    The summary of the attempt before goes: were this one killed, its settings would pass for those that came to that end.
    """
    folder.remove("summary.json")
    text = to_yaml(config)
    (folder / "attempts" / attempt).put(SETTINGS, text)
    (folder / "attempts" / attempt).put_json(ENVIRONMENT, environment)
    folder.put(SETTINGS, text)
    folder.put_json(ENVIRONMENT, environment)
