"""The page of a model on the hub, from its run's record: data, settings, figures, how to load it, and a licence to choose.

card = model_card(storage / "tickets", "me/tickets", step=1000)   # Markdown with the hub's YAML on top
"""

import yaml

from raystride.pipelines.files import Folder
from raystride.pipelines.hub import is_hub_name, name_and_revision
from raystride.pipelines.report.origin import origin_of

FIGURES = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "steps": "steps",
    "samples_seen": "samples",
    "tokens_seen": "tokens",
    "parameters_sha256": "hash of the last parameters",
}
"""Of a run's summary, by what they are called here."""


def model_card(run: Folder, name: str, step: int, *, adapter: bool = False) -> str:
    """The card of a model that is called so, of the checkpoint after so many steps; `adapter`: it needs its base.

    What is not recorded is left out.
    """
    origin = origin_of(run)
    base = (origin.config.model.init_from if origin.config else None) or ""
    library = "peft" if adapter else "transformers"
    head = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["raystride"]}
    head |= {"base_model": name_and_revision(base)[0]} if is_hub_name(base) else {}
    summary = run.read_json("summary.json") if run.exists("summary.json") else {}
    figures = [[said, summary[key]] for key, said in FIGURES.items() if summary.get(key) is not None]
    figures += [[key, value] for key, value in sorted((summary.get("metrics") or {}).items())]
    parts = [
        f"---\n# license: yours to fill in, such as apache-2.0\n{yaml.safe_dump(head, sort_keys=False)}---\n",
        f"# {name}\n\nThe model of the run `{run.name}` after {step} steps, trained by Raystride.\n",
        "## Data\n\n" + _table(["", ""], origin.facts(None)),
        "## Settings\n\nThose that are not as they are by default.\n\n"
        + _table(["setting", "value"], _settings(origin.changed)),
        "## Figures\n\n" + _table(["", ""], figures),
        "## Use\n\n" + (_use_of_adapter(name, base) if adapter else _use(name)),
        "## Licence\n\nNot chosen yet: fill in `license` at the top of this page.\n",
    ]
    return "\n".join(parts)


def _use(name: str) -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n'
    )


def _use_of_adapter(name: str, base: str) -> str:
    place, revision = name_and_revision(base) if is_hub_name(base) else ("FOLDER", None)
    said = "" if is_hub_name(base) else "It is of no use without its base, here FOLDER, which is not on the hub.\n\n"
    at = f', revision="{revision}"' if revision else ""
    return (
        f"{said}```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{place}"{at})\n'
        f'model = PeftModel.from_pretrained(base, "{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n'
    )


def _settings(changed: list[list[str]]) -> list[list[object]]:
    return [[f"`{key}`", f"`{value}`"] for key, value, _ in changed]


def _table(head: list[str], rows: list[list[object]] | list[list[str]]) -> str:
    if not rows:
        return "Not recorded.\n"
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(str(each).replace("|", "\\|").replace("\n", " ") for each in line) + " |\n" for line in lines
    )
