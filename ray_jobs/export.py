"""Writes a trained model for other programs: `transformers.AutoModelForCausalLM` and `AutoTokenizer`, or MLflow's server.

python ray_jobs/export.py --run NAME --to hugging_face
python ray_jobs/export.py --run NAME --to mlflow
python ray_jobs/export.py --run NAME --push org/name
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["export", *sys.argv[1:]]))

from raystride.pipelines.commands import pasted
from raystride.pipelines.config.jobs import Export
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.credentials import hidden
from raystride.pipelines.files import Folder
from raystride.pipelines.hub import is_hub_name
from raystride.pipelines.launch.exit_codes import DONE, guarded

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.opening import Opened


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    about = "Write a trained model for other programs."
    return command(Export, _export, arguments, program="raystride export", description=about)


def _export(parsed: Parsed[Export]) -> int:
    return guarded(lambda: _exported(parsed.settings))


def _exported(settings: Export) -> int:
    from raystride.pipelines.launch.finished import export_run, push_run, writes_adapter

    storage = Folder.at(settings.storage)
    folder, opened = export_run(settings)
    to_mlflow = settings.to == "mlflow"
    adapter = writes_adapter(settings, opened.config)
    what = opened.config.task if to_mlflow else "adapter" if adapter else opened.config.model.flavour
    print(f"{what} of step {opened.step}: {', '.join(folder.names())}")
    logged = _log(settings, opened, storage) if to_mlflow else pasted("ui", storage=str(storage))
    if settings.push and adapter and not is_hub_name(base := opened.config.model.init_from or ""):
        print(f"note     its base {hidden(base)} is no model of the hub: push it as well, others need it", file=sys.stderr)
    if settings.push:
        print(f"pushed   {push_run(settings, folder, opened.step)}")
    print(f"results  {folder}")
    print(f"mlflow   {logged}")
    if to_mlflow:
        print(f"next     mlflow models serve -m {folder} --env-manager local")
    elif adapter:
        print(f'next     peft.PeftModel.from_pretrained(base, "{folder}"), or --lora.init_from {folder}')
    else:
        print(f'next     transformers.AutoModelForCausalLM.from_pretrained("{folder}"), or --model.init_from {folder}')
    return DONE


def _log(settings: Export, opened: "Opened", storage: Folder) -> str:
    """Logs the model to its run in MLflow; where it is to be seen."""
    from raystride.pipelines.evaluate.mlflow_model import log_mlflow_model
    from raystride.pipelines.evaluate.recording import reopen

    try:
        if reopened := reopen(storage / settings.run, opened.config.record, storage):
            return log_mlflow_model(opened, reopened, settings.sample)
    except Exception as error:  # MLflow, its database and its server raise whatever they like
        print(hidden(f"MLflow does not have it: {error}"), file=sys.stderr)
    return "not logged there"
