"""The Hugging Face model card of a run's model: data, settings, figures, usage, and a licence to fill in.

card = model_card(storage / "tickets", "me/tickets", step=1000)   # Markdown with the hub's YAML on top
"""

from collections.abc import Mapping
from typing import Any

from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.observability.report.origin import Origin, load_origin
from raystride.pipelines.observability.report.run_figures import list_metrics, list_run_figures
from raystride.pipelines.system.hub import is_hub_name, name_and_revision
from raystride.pipelines.system.storage.folder import Folder

CARD_FIGURES = ("steps", "val_loss", "train_loss", "seen")
"""Keys of a run's figures that say something of its model, besides the task's metrics."""


def model_card(run: Folder, name: str, step: int, *, adapter: bool = False) -> str:
    """Returns the card of the model `name` from the checkpoint after `step` steps; `adapter` means that it needs its base.

    Facts that are not recorded are left out.
    """
    origin = load_origin(run)
    base = (origin.config.model.init_from if origin.config else None) or ""
    task = origin.config.task if origin.config else ""
    summary = read_summary(run)
    metrics = summary.get("metrics") or {}
    figures = [[each.label, each.text] for each in list_run_figures(summary) if each.key in (*CARD_FIGURES, *metrics)]
    if summary.get("parameters_sha256"):
        figures.append(["hash of the last parameters", summary["parameters_sha256"]])
    metadata = _metadata(origin, summary, name, base, task, adapter)
    parts = [
        f"---\n# license: yours to fill in, such as apache-2.0\n{metadata}\n---\n",
        f"# {name}\n\nThe model of the run `{run.name}` after {step} steps, trained by Raystride.\n",
        "## Data\n\n" + _markdown_table(["", ""], origin.list_facts(None)),
        "## Settings\n\nThose that are not as they are by default.\n\n"
        + _markdown_table(["setting", "value"], _settings_rows(origin.changed_settings)),
        "## Figures\n\n" + _markdown_table(["", ""], figures),
        "## Use\n\n" + (_adapter_usage_text(name, base, task) if adapter else _usage_text(name, task)),
        "## Licence\n\nNot chosen yet: fill in `license` at the top of this page.\n",
    ]
    return "\n".join(parts)


def _metadata(origin: Origin, summary: Mapping[str, Any], name: str, base: str, task: str, adapter: bool) -> str:
    """Returns the hub's YAML: library, task, base, and the metrics of the last validation, as it lists them."""
    from huggingface_hub import EvalResult, ModelCardData

    tag = "text-classification" if task == "classification" else "text-generation"
    source = origin.data_source or "not recorded"
    results = [
        EvalResult(
            task_type=tag,
            dataset_type=source,
            dataset_name=source,
            dataset_split="validation",
            metric_type=metric.key.removeprefix("val_"),
            metric_name=metric.label,
            metric_value=summary["metrics"][metric.key],
        )
        for metric in list_metrics(summary)
    ]
    data = ModelCardData(
        base_model=name_and_revision(base)[0] if is_hub_name(base) else None,
        eval_results=results or None,
        library_name="peft" if adapter else "transformers",
        model_name=name if results else None,
        pipeline_tag=tag,
        tags=["raystride"],
    )
    return str(data.to_yaml())


def _auto_class(task: str) -> str:
    return "AutoModelForSequenceClassification" if task == "classification" else "AutoModelForCausalLM"


def _usage_text(name: str, task: str) -> str:
    return (
        f"```python\nfrom transformers import {_auto_class(task)}, AutoTokenizer\n\n"
        f'model = {_auto_class(task)}.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n'
    )


def _adapter_usage_text(name: str, base: str, task: str) -> str:
    base_name, revision = name_and_revision(base) if is_hub_name(base) else ("FOLDER", None)
    warning = "" if is_hub_name(base) else "It is of no use without its base, here FOLDER, which is not on the hub.\n\n"
    revision_argument = f', revision="{revision}"' if revision else ""
    return (
        f"{warning}```python\nfrom peft import PeftModel\nfrom transformers import {_auto_class(task)}, AutoTokenizer\n\n"
        f'base = {_auto_class(task)}.from_pretrained("{base_name}"{revision_argument})\n'
        f'model = PeftModel.from_pretrained(base, "{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n'
    )


def _settings_rows(changed_settings: list[list[str]]) -> list[list[object]]:
    return [[f"`{key}`", f"`{value}`"] for key, value, _ in changed_settings]


def _markdown_table(head: list[str], rows: list[list[object]] | list[list[str]]) -> str:
    if not rows:
        return "Not recorded.\n"
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |\n" for line in lines
    )
