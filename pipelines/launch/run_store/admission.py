"""Admits a run before anything expensive starts: compares it with its previous attempt, and checks settings, base and data.

admission = admit_run(RunContext(config, storage, screen.log))    # raises SettingError, DataError
admission.is_complete, admission.previous, admission.context.kept
"""

from dataclasses import dataclass, replace

from raystride.pipelines.config import Config, TrainConfig
from raystride.pipelines.config.base_model import is_run
from raystride.pipelines.data.prepare.prepare import check_data
from raystride.pipelines.data.prepare.run_context import Log, RunContext
from raystride.pipelines.data.pretrained import BaseInfo, check_base
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.teacher import check_teacher
from raystride.pipelines.launch.run_store.branch import begin_branch, with_previous_branch
from raystride.pipelines.launch.run_store.changes import find_changes
from raystride.pipelines.launch.run_store.lease import RunLease, RunLocked, new_attempt
from raystride.pipelines.launch.run_store.resume import (
    PreviousAttempt,
    describe_completion,
    has_same_data,
    keep_preparations,
    newest_step,
    read_previous_attempt,
    refuse_changes,
    refuse_edits,
    refuse_less,
    with_previous_base,
)
from raystride.pipelines.launch.run_store.start_over import starts_over
from raystride.pipelines.observability.record.mlflow.follower import replay, replay_command
from raystride.pipelines.observability.record.mlflow.log import MlflowLog
from raystride.pipelines.observability.record.summary import put_summary
from raystride.pipelines.observability.record.tensorboard_log import check_tensorboard
from raystride.pipelines.observability.report import closing_screen
from raystride.pipelines.system.commands import shell_command
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import newest_manifest
from raystride.pipelines.train.lora.init_from_run import check_run


@dataclass(frozen=True)
class Admission:
    """An admitted run, its previous attempt and its base."""

    context: RunContext
    """The run: a resumed one has the base of its previous attempt in its settings, and the preparations that it keeps."""
    previous: PreviousAttempt | None
    parent: PreviousAttempt | None = None
    """The run that this start branches from; None for a run that has a checkpoint of its own."""
    is_complete: bool = False
    """Whether nothing is left to do; base and data are not checked then."""
    starts_over: bool = False
    """Whether the checkpoints are to be moved aside before the workers start."""
    base: BaseInfo | None = None
    """Description of a new run's base, if that is a folder or model of the hub."""

    @property
    def origin(self) -> PreviousAttempt | None:
        """The attempt whose settings, data and code those of this start are compared with."""
        return self.parent or self.previous


def admit_run(context: RunContext) -> Admission:
    """Shows the run and whether it resumes, and checks it; the settings have a name and absolute paths.

    Raises SettingError and DataError if it cannot run, before the run's name is taken.
    """
    previous = read_previous_attempt(context.run_folder)
    if previous:
        refuse_edits(previous, context.config.resume, context.log)
        newest_manifest(context.run_folder)  # raises if a newer version has written what this one does not know
        config = with_previous_branch(previous, context.config)
        context = context.with_config(with_previous_base(previous, config))
    else:
        _check_run_to_repeat(context)
    begins_anew = starts_over(context.config.launch, context.run_folder, context.log)
    context, parent = _begin_branch(context, previous, begins_anew)
    if _has_nothing_left(context, previous, begins_anew):
        return Admission(context, previous, is_complete=True)
    if context.config.objective.teacher:
        context.log(f"teacher {context.config.objective.teacher}: {check_teacher(context.config)}")
    base = _check_base(context.config, parent or (None if begins_anew else previous), context.log)
    if origin := parent or previous:
        context = _with_kept_preparations(context, origin)
    check_data(context)
    return Admission(context, previous, parent, starts_over=begins_anew, base=base)


def _begin_branch(
    context: RunContext, previous: PreviousAttempt | None, begins_anew: bool
) -> tuple[RunContext, PreviousAttempt | None]:
    """Returns the context, and the parent of a branch that has no checkpoint. Raises SettingError if it differs from it."""
    has_own = newest_step(context.run_folder) is not None or (
        previous and describe_completion(previous, context.config.train, context.config.validation)
    )
    if not context.config.train.branch_from or (has_own and not begins_anew):
        return context, None
    context, parent = begin_branch(context)
    context = context.with_config(with_previous_base(parent, context.config))
    refuse_changes(parent, context.config, has_same_data=lambda: has_same_data(parent, context))
    find_changes(parent, context, check_raw_files=False).judge(context.config, None, context.notice)
    return context, parent


def _has_nothing_left(context: RunContext, previous: PreviousAttempt | None, begins_anew: bool = False) -> bool:
    """Shows the run and whether it resumes; returns whether nothing is left to do. Raises SettingError."""
    config, folder, log = context.config, context.run_folder, context.log
    resumed = None if begins_anew else previous
    reached, step = (
        (describe_completion(resumed, config.train, config.validation), newest_step(folder)) if resumed else (None, None)
    )
    _check_settings(context, previous)
    if resumed:
        refuse_less(resumed, config.train, config.run, step)
    goes_on = f", going on from step {step}" if step and not reached else ""
    log(f"run {config.run} in {context.storage}{goes_on}")
    if resumed:
        find_changes(resumed, context, check_raw_files=bool(reached)).judge(config, reached, context.notice)
        if not reached and resumed.code is None and context.task.reads_dataset:
            context.notice(
                f"the validations of run {config.run} are drawn anew: what a loss or metric draws is seeded by batch now, "
                "and batches have other sizes, so figures before and after are not quite comparable"
            )
    if config.validation.metric != "val_loss":
        highest = config.validation.better == "max"
        log(f"best checkpoint: the {'highest' if highest else 'lowest'} {config.validation.metric} (validation.direction)")
    if resumed and reached:
        context.notice(_describe_completed_run(folder, config.train, config.run, reached, resumed))
        log(closing_screen(_with_ended_record(context, resumed).summary or {}, folder))
        return True
    return False


def _check_settings(context: RunContext, previous: PreviousAttempt | None) -> None:
    """Raises SettingError for settings that can be rejected before anything starts."""
    check_metric(context.config)
    check_tensorboard(context.config.record)
    if context.config.optimizer.groups:
        from raystride.pipelines.train.optimizer import check_groups  # slow import

        check_groups(context.config)
    if previous:
        refuse_changes(previous, context.config, has_same_data=lambda: has_same_data(previous, context))
    else:
        refuse_dropout_beside_reference(context.config)


def refuse_dropout_beside_reference(config: Config) -> None:
    """Raises SettingError for dropout in preference learning, whose reference has none; runs of 0.3 go on with theirs."""
    if config.task != "preference" or config.objective.reference_free:
        return
    for section, probability in ((config.model, config.model.dropout), (config.lora, config.lora.dropout)):
        if probability:
            raise section.error(
                "dropout",
                "must be 0 with task `preference`: the reference's log-probabilities have no dropout, so the model would "
                "differ from it at random, from the first step on",
            )


def check_metric(config: Config) -> None:
    """Raises SettingError for a metric that the task does not measure, as the first validation would fail otherwise, and
    for one of which nothing says whether less or more is better."""
    task_metrics = build_task(config).metrics
    if config.validation.metric not in task_metrics:
        raise config.validation.error("metric", f"must be one of {', '.join(sorted(task_metrics))}")
    _ = config.validation.better


def _with_ended_record(context: RunContext, previous: PreviousAttempt) -> PreviousAttempt:
    """Returns the attempt after MLflow has the run's end, which it lacks if the driver was killed after the summary.

    Warns where that cannot be done now. Nothing is done while another process owns the run.
    """
    folder, config = context.run_folder, context.config
    log = MlflowLog.for_run(folder, str(config.run), config.record, context.storage)
    if not (log and log.lacks_end and previous.summary):
        return previous
    try:
        with RunLease.acquire(folder, new_attempt(), context.log) as lease:
            replay(folder, log, previous.summary["status"], print_warning, lease.permit)
            summary = previous.summary | {"mlflow_run_id": log.run_id}
            put_summary(folder, summary)
            return replace(previous, summary=summary)
    except RunLocked:
        return previous
    except Exception as error:  # MLflow, its database and its server raise errors of any type
        cause = redact(f"{type(error).__name__}: {error}")[:200]
        print_warning(f"MLflow lacks the end of this run, which is safe in its journal: {replay_command(folder)} ({cause})")
        return previous


def _describe_completed_run(
    folder: Folder, train: TrainConfig, run: str | None, reached: str, previous: PreviousAttempt
) -> str:
    """Returns the message about a run that has nothing left to do."""
    more = 2 * max(1, (previous.summary or {}).get("steps") or train.steps)
    return "\n".join(
        [
            f"run {run} is complete ({reached}), and stays as it is. To train it further, give more steps or epochs:",
            f"  {shell_command('train', str(run), str(folder.parent), f'--train.steps {more}')}",
            "and to train another one, another name (--run NAME, in Python run=)",
        ]
    )


def _check_run_to_repeat(context: RunContext) -> None:
    """Shows which run's choices a new run takes. Raises SettingError if that run is not there or has no checkpoint."""
    if not (name := context.config.repeat):
        return
    if not newest_manifest(context.storage / name):
        raise context.config.error("repeat", f"must name a run in {context.storage} that has a checkpoint")
    context.log(f"repeat: workers, threads, linear products and attention as run {name} has them, where this machine can")


def _check_base(config: Config, previous: PreviousAttempt | None, log: Log) -> BaseInfo | None:
    """Checks and shows the base of a new run; returns its description if it is a folder or model of the hub.

    Raises SettingError before the run's name is taken by settings that do not fit.
    """
    base_path = config.model.init_from
    if previous or not base_path:
        return None
    if is_run(base_path):
        check_run(config.model, config.task, Folder(base_path))
        return None
    base = check_base(config, base_path)
    log(f"base {base_path}: {base}; context {config.model.context:,}")
    log("from it: " + ", ".join(f"{name} {value}" for name, value in base.settings.items()))
    return base


def _with_kept_preparations(context: RunContext, previous: PreviousAttempt) -> RunContext:
    """Returns the context with the preparations with which the run resumes. Raises DataError, SettingError if it cannot."""
    context = replace(context, kept=keep_preparations(previous, context))
    if previous.sources and context.config.data.sources:  # a source that comes back is not in the previous settings
        refuse_changes(previous, context.config, context.identity())
    return context
