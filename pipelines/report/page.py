"""A run's page: one self-contained HTML file that says how well the run used its machine, from its journal alone.

    write_page(folder, gather_figures(stream_entries(folder)), summary)   # as `report.html`

No script, font or picture is fetched from elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from raystride.pipelines.files import Folder
from raystride.pipelines.pages import heading, items, missing, page, paragraph, preformatted, table
from raystride.pipelines.report import pictures
from raystride.pipelines.report.advice import advise
from raystride.pipelines.report.figures import Figures
from raystride.pipelines.report.origin import Origin, origin_of

FIGURES: dict[str, tuple[str, str]] = {
    "status": ("status", "{}"),
    "steps": ("steps", "{:,}"),
    "workers": ("workers", "{}"),
    "tokens_seen": ("tokens seen", "{:,}"),
    "train_loss": ("training loss", "{:.4f}"),
    "val_loss": ("validation loss", "{:.4f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "precision": ("precision", "{}"),
    "products": ("linear products", "{}"),
    "mfu": ("model FLOP utilisation", "{:.1%}"),
    "step_seconds_p50": ("step, median, s", "{:.4f}"),
    "step_seconds_p95": ("step, 95 %, s", "{:.4f}"),
    "data_wait_share": ("waiting for data", "{:.1%}"),
    "seconds_to_first_step": ("first step after, s", "{:.1f}"),
    "peak_memory_bytes": ("peak memory, GiB", "{:.2f}"),
    "joules_per_token": ("joules a token", "{:.3g}"),
    "energy_covers": ("energy covers", "{}"),
    "average_power_watts": ("average power, W", "{:.0f}"),
    "throttled_seconds": ("throttled, s", "{:.0f}"),
    "gpu_idle_share": ("GPU idle", "{:.1%}"),
    "straggler_loss_share": ("lost to the slowest rank", "{:.1%}"),
    "slowest_rank": ("slowest rank", "{}"),
}
"""Of the summary, by key: what it is called, and its format. What a run does not have is left out."""
COSTLIEST = 10
GIB = 2**30


def write_page(folder: Folder, figures: Figures, summary: Mapping[str, Any]) -> None:
    """Puts the page of the run in this folder there, as `report.html`. Raises OSError."""
    folder.put("report.html", run_page(figures, summary, _operations(folder), origin_of(folder)))


def run_page(
    figures: Figures,
    summary: Mapping[str, Any],
    operations: Sequence[Mapping[str, Any]] = (),
    origin: Origin | None = None,
) -> str:
    """The page as HTML, from a journal's figures, the summary, what the run was made of, and the costliest operations
    where steps were profiled.
    """
    origin = origin or Origin()
    shares = figures.part_shares
    sections = [
        ("Loss", pictures.losses(figures), "No loss was measured."),
        ("Speed", pictures.speed(figures) + pictures.mfu(figures), "No speed was measured."),
        ("Where a step's time goes", pictures.step_parts(shares) + pictures.parts_over_time(figures), "Not measured."),
        ("Rank by time: own seconds a step", pictures.rank_heat(figures), "One worker: there is nothing to compare."),
        ("The machine", pictures.strips(figures), "No device was sampled."),
        ("Costliest operations", _operations_table(operations), "Not profiled; --profile.tool torch does it."),
    ]
    body = [part for title, content, none in sections for part in (heading(title), content or missing(none))]
    return page(
        f"Run {summary.get('run', '')}",
        table((), _figures(summary)),
        heading("What to try next"),
        items(advise(summary, shares)),
        *body,
        heading("What it is made of"),
        table((), origin.facts(figures.began)),
        heading("Settings that are not the defaults"),
        table(["setting", "value", "default"], origin.changed)
        if origin.changed
        else missing("None, or they are not known."),
        *([heading("What it wrote at the end"), preformatted(origin.sample)] if origin.sample.strip() else []),
        paragraph(
            "Parts of a step are the host's time; on GPUs forward, backward and optimiser are that of launching them."
        ),
    )


def _figures(summary: Mapping[str, Any]) -> list[list[str]]:
    """What the run has of the figures, with their names."""
    known = {key: summary[key] for key in FIGURES if summary.get(key) is not None}
    scaled = {key: value / GIB if key.endswith("_bytes") else value for key, value in known.items()}
    return [[FIGURES[key][0], FIGURES[key][1].format(value)] for key, value in scaled.items()]


def _operations_table(operations: Sequence[Mapping[str, Any]]) -> str:
    rows = [[str(each["name"]), f"{each['calls']:,}", f"{each['share']:.1%}"] for each in operations[:COSTLIEST]]
    return table(["operation", "calls", "share of the time"], rows) if rows else ""


def _operations(folder: Folder) -> list[dict[str, Any]]:
    """The costliest operations of the newest profile by PyTorch, where there is one."""
    profiles = folder / "profiles"
    names = sorted(name for name in profiles.names() if name.endswith("-operations.json")) if profiles.exists() else []
    return list(profiles.read_json(names[-1])) if names else []
