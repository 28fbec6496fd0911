"""Begins a run at a checkpoint of another one (`train.branch_from`), of which nothing is written.

A branch has its parent's data, model and slots, and may have another schedule, other rates and another length. It is
compared with its parent as a resumed run is with its previous attempt. Until it has a checkpoint of its own it begins at the
parent's each time; afterwards it never reads the parent again.

    config = with_previous_branch(previous, config)       # the step that `RUN` stood for at the first start
    context, parent = begin_branch(context)               # the parent's attempt; raises SettingError
"""

from dataclasses import replace
from typing import Any

from raystride.pipelines.config import Config
from raystride.pipelines.config.train import parse_branch
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.launch.run_store.resume import PreviousAttempt, read_previous_attempt
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import checkpoint_names, parse_step, read_manifest, step_name


def with_previous_branch(previous: PreviousAttempt, config: Config) -> Config:
    """Returns the settings of a resumed run with the step of its parent that was chosen when it began."""
    before = previous.config.train.branch_from
    if before and config.train.branch_from == parse_branch(before)[0]:
        return replace(config, train=replace(config.train, branch_from=before))
    return config


def begin_branch(context: RunContext) -> tuple[RunContext, PreviousAttempt]:
    """Returns the context with the step that `train.branch_from` stands for, and the parent's newest attempt.

    Raises SettingError if there is no such run, or its checkpoint is missing or not complete.
    """
    train = context.config.train
    run, step = parse_branch(train.branch_from or "")
    folder = context.storage / run
    attempt = read_previous_attempt(folder)
    if attempt is None:
        raise train.error("branch_from", f"must name a run in {context.storage}, and there is no run {run}")
    chosen = _find_step(folder / "checkpoints", step)
    if isinstance(chosen, str):
        raise train.error("branch_from", f"must name a complete checkpoint of run {run}: {chosen}")
    if 0 < train.steps <= chosen:
        raise train.error("steps", f"must be above {chosen}, the step of train.branch_from {run}")
    context.log(f"branch of run {run} from step {chosen}")
    pinned = replace(train, branch_from=f"{run}/{step_name(chosen)}")
    return context.with_config(replace(context.config, train=pinned)), replace(attempt, is_parent=True)


def _find_step(checkpoints: Folder, step: int | None) -> int | str:
    """Returns the step whose checkpoint is complete, the newest such if none is named; else what is wrong.

    Workers verify the hashes of its files; here they are looked for.
    """
    files = {name: set[str]() for name in checkpoint_names(checkpoints.names())}
    for file in checkpoints.sizes():
        name, _, inside = file.partition("/")
        if name in files:
            files[name].add(inside)
    # Manifests outlive their data, and a long run has thousands.
    with_data = [name for name, inside in files.items() if any("/" in file for file in inside)]
    complete = [name for name in with_data if _is_complete(read_manifest(checkpoints / name), files[name])]
    steps = [found for name in complete if (found := parse_step(name)) is not None]
    if step is None:
        return steps[-1] if steps else "it has none"
    if step in steps:
        return step
    name, there = step_name(step), ", ".join(map(str, steps)) or "none"
    fault = "is not complete, or its data has been removed" if name in files else "is not there"
    return f"{name} {fault}; complete are steps {there}"


def _is_complete(manifest: dict[str, Any], files: set[str]) -> bool:
    return bool(manifest) and manifest.get("files", {}).keys() <= files
