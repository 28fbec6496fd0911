"""What differs between a run and a start under its name, of what a resume may change, and whether this start may.

A name means one result. A complete run is returned only to a start that asks for the same one. A run with steps left takes
other free settings and other code, with a line, and other samples of a user's own model only by `resume.accept data`.

changes = find_changes(previous, context)
changes.judge(context.config, complete="6 steps", notice=screen.notice)          # raises SettingError
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raystride.pipelines.config import Config, ResumeConfig, SettingError
from raystride.pipelines.config.mixture import defines_source
from raystride.pipelines.data.prepare.manifest import load_finished_manifest
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.stored_code import hash_named_code
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.launch.run_store.resume import PreviousAttempt, find_changed_preparations
from raystride.pipelines.system.credentials import redact_all_uris


@dataclass(frozen=True)
class Changes:
    """Differences, a line each, from what the newest attempt of a run was trained with."""

    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Free settings that shape the result, by full name: before and now."""
    code: Sequence[str] = ()
    """The user's code."""
    data: Sequence[str] = ()
    """Content of the data."""
    is_code_certain: bool = True
    """Whether the run itself has recorded its code. Runs of 0.3 share a record with those of equal shapes."""

    @property
    def setting_lines(self) -> list[str]:
        """The settings, a line each."""
        return [f"{key}: {before!r} before, {now!r} now" for key, (before, now) in self.settings.items()]

    def judge(self, config: Config, complete: str | None, notice: Callable[[str], None]) -> None:
        """Shows what this start changes. Raises SettingError if it may not.

        `complete` is the progress of a run with nothing left to do, None for a run that goes on.
        """
        code = self.code if self.is_code_certain else ()
        if complete and (lines := [*self.setting_lines, *code, *self.data]):
            key, (before, now) = next(iter(self.settings.items()), ("run", (None, config.run)))
            raise SettingError(
                f"run {config.run} is complete ({complete}), and this start asks for another result than it has:\n  "
                + "\n  ".join(lines)
                + "\n  give another name (--run NAME, in Python run=), or more steps: it is then trained further with these",
                setting=key,
                value=now,
                allowed=before,
            )
        if self.setting_lines:
            notice(f"run {config.run} goes on with other settings: {'; '.join(self.setting_lines)}")
        if self.code:
            notice(f"run {config.run} goes on with other code: {'; '.join(self.code)}")
        if not complete and self.data:
            self._accept_data(config.resume, config.run, notice)

    def _accept_data(self, resume: ResumeConfig, run: str | None, notice: Callable[[str], None]) -> None:
        listed = "; ".join(self.data)
        if resume.accept != "data":
            rule = "must be `data` for a run to go on with other data"
            raise SettingError(
                f"resume.accept is {resume.accept!r}: it {rule}: {listed}. Give the former data, start another run "
                "(--run NAME, in Python run=), or take it by --resume.accept data",
                setting="resume.accept",
                value=resume.accept,
                allowed="data",
            )
        notice(f"run {run} goes on with other data: {listed}")


def find_changes(previous: PreviousAttempt, context: RunContext, *, check_raw_files: bool) -> Changes:
    """Returns what differs from the newest attempt of a run. Raises DataError, SettingError for data that cannot be read.

    `check_raw_files`: whether raw files are compared, too. A run that goes on keeps what it has prepared of them.
    """
    task, settings = context.task, _compare_settings(previous.config, context.config)
    code = _compare_named_code(previous, context.config)
    if not task.reads_dataset:
        return Changes(settings, code, find_changed_preparations(previous, context) if check_raw_files else ())
    described = _described_dataset(previous, context)
    _refuse_other_shapes(described, task, context.notice)
    now, before = identify_own_model(task), previous.own_model
    of_run = before or ({"code": described["code"].partition("-")[0]} if described else {})
    if of_run and of_run["code"] != now["code"]:
        code = [*code, "the code of model, data or loss, or of what else was given with them, has changed"]
    known = of_run.get("content", {})
    data = [
        f"{name} has other samples of the same shape"
        for name, found in now["content"].items()
        if not _is_same_content(known.get(name, ""), found)
    ]
    return Changes(settings, code, data, is_code_certain=bool(before))


def _is_same_content(before: str, now: str) -> bool:
    """Returns whether two hashes of a dataset are equal in the portions that both have; True if one is unknown."""
    portions = zip(before.split("-"), now.split("-"), strict=False)
    return not before or not now or all(one == other for one, other in portions)


def identify_own_model(task: Task) -> dict[str, Any]:
    """Returns what a run of a user's own model records of it: a hash of its code, and of its data's content by name."""
    described = task.describe_dataset()
    return {"code": described["code"].partition("-")[0], "content": described["content"]}


def _described_dataset(previous: PreviousAttempt, context: RunContext) -> Mapping[str, Any]:
    """Returns the description of a user's model and data in the run's preparation, which runs of equal shapes share."""
    manifest = load_finished_manifest(context.storage / ".prepared" / previous.data) if previous.data else None
    return (manifest.learned.get("dataset") if manifest else None) or {}


def _refuse_other_shapes(before: Mapping[str, Any], task: Task, notice: Callable[[str], None]) -> None:
    """Shows other names of a user's figures. Raises SettingError if lengths or shapes differ."""
    now = json.loads(json.dumps(task.describe_dataset()))
    for key, what in (("logged", "the loss"), ("measured", "metrics")) if before else ():
        if before[key] != now[key]:
            earlier, current = (", ".join(description[key]) or "none" for description in (before, now))
            notice(f"figures of {what}: {earlier} before, {current} now")
    for key, names in (("parameters", "model"), ("sample", "data"), ("train", "data"), ("validation", "validation")):
        if not before or before[key] == now[key]:
            continue
        was, given = describe_difference(before[key], now[key])
        raise SettingError(
            f"{names} differs from that of this run: {key} {was} before, {given} now. Give the former one, or start another "
            "run with another name",
            setting=names,
            value=given,
            allowed=was,
        )


def describe_difference(before: Any, now: Any) -> tuple[str, str]:
    """Returns the first difference of two mappings of JSON values, on both sides; of other values these."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*before, *now)):
            if before.get(key) != now.get(key):
                return f"{key} {before.get(key, 'none')}", f"{key} {now.get(key, 'none')}"
    return str(before), str(now)


def _compare_settings(previous: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the free settings that shape the result and differ; a mixture's sources may come and go, too."""
    before, now = ({**own.free_result_settings(), **_mixture(own.flat())} for own in (previous, config))
    free = [key for key in {**before, **now} if not (defines_source(key) and key in before and key in now)]
    pairs = {key: (redact_all_uris(before.get(key)), redact_all_uris(now.get(key))) for key in free}
    return {key: (old, new) for key, (old, new) in pairs.items() if _as_list(old) != _as_list(new)}


def _mixture(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key.startswith("data.sources.")}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _compare_named_code(previous: PreviousAttempt, config: Config) -> list[str]:
    """Returns the plug-ins and transforms whose files have another content than those of the newest attempt."""
    if previous.code is None:
        return []
    before, now = previous.code, hash_named_code(config)
    changed = [name for name, found in now.items() if found not in before.values()]
    gone = [name for name, found in before.items() if found not in now.values() and name not in now]
    return [*(f"{name} has changed" for name in changed), *(f"{name} is not named any more" for name in gone)]
