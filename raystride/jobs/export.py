"""Exports a trained model for `transformers.AutoModelForCausalLM` (an encoder: `AutoModelForSequenceClassification`) and
`AutoTokenizer`, or for MLflow's server.

python ray_jobs/export.py --run NAME --to hugging_face
python ray_jobs/export.py --run NAME --to mlflow
python ray_jobs/export.py --run NAME --push org/name
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raystride.pipelines.config.jobs import ExportConfig
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.launch.console.exit_codes import DONE
from raystride.pipelines.system.commands import shell_command
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.hub import is_hub_name
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.load_run import LoadedModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    about = "Write a trained model for other programs."
    return command(ExportConfig, _run_job, arguments, program="raystride export", description=about)


def _run_job(parsed: Parsed[ExportConfig]) -> int:
    settings = parsed.settings
    from raystride.pipelines.launch.finished import export_run, push_run, writes_adapter

    storage = Folder.from_uri(settings.storage)
    folder, opened = export_run(settings)
    to_mlflow = settings.to == "mlflow"
    adapter = writes_adapter(settings, opened.config.lora)
    named_by_task = to_mlflow or opened.task.reads_dataset
    what = opened.config.task if named_by_task else "adapter" if adapter else opened.config.model.architecture
    print(f"{what} of {opened.step_text}: {', '.join(folder.names())}")
    logged = _log_to_mlflow(settings, opened, storage) if to_mlflow else shell_command("ui", storage=str(storage))
    if settings.push and adapter and not is_hub_name(base := opened.config.model.init_from or ""):
        print(f"note     its base {redact(base)} is no model of the hub: push it as well, others need it", file=sys.stderr)
    if settings.push:
        print(f"pushed   {push_run(settings, folder, opened.step)}")
    print(f"results  {folder}")
    print(f"mlflow   {logged}")
    if to_mlflow:
        print(f"next     mlflow models serve -m {folder} --env-manager local")
    elif opened.task.reads_dataset:
        print(f"next     load {folder} in your own program, with torch or safetensors")
    elif adapter:
        print(f'next     peft.PeftModel.from_pretrained(base, "{folder}"), or --lora.init_from {folder}')
    else:
        kind = "SequenceClassification" if opened.config.task == "classification" else "CausalLM"
        print(f'next     transformers.AutoModelFor{kind}.from_pretrained("{folder}"), or --model.init_from {folder}')
    return DONE


def _log_to_mlflow(settings: ExportConfig, opened: "LoadedModel", storage: Folder) -> str:
    """Logs the model to its run in MLflow; returns the location that is printed."""
    from raystride.pipelines.evaluate.mlflow_model import log_mlflow_model
    from raystride.pipelines.evaluate.recording import reopen_run

    try:
        if reopened := reopen_run(storage / settings.run, opened.config.record, storage):
            return log_mlflow_model(opened, reopened, settings.sample)
    except Exception as error:  # MLflow, its database and its server raise whatever they like
        print(redact(f"MLflow does not have it: {error}"), file=sys.stderr)
    return "not logged there"
