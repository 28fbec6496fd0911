"""A run's page: one self-contained HTML file that says how well the run used its machine, from its journal alone.

    write_page(folder, read_entries(folder), summary)         # as `report.html`

No script, font or picture is fetched from elsewhere.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.files import Folder
from pipelines.phases import PARTS
from pipelines.report import pictures
from pipelines.report.advice import advise
from pipelines.report.curve import series

FIGURES: dict[str, tuple[str, str]] = {
    "status": ("status", "{}"),
    "steps": ("steps", "{:,}"),
    "workers": ("workers", "{}"),
    "tokens_seen": ("tokens seen", "{:,}"),
    "train_loss": ("training loss", "{:.4f}"),
    "val_loss": ("validation loss", "{:.4f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "mfu": ("model FLOP utilisation", "{:.1%}"),
    "step_seconds_p50": ("step, median, s", "{:.4f}"),
    "step_seconds_p95": ("step, 95 %, s", "{:.4f}"),
    "data_wait_share": ("waiting for data", "{:.1%}"),
    "seconds_to_first_step": ("first step after, s", "{:.1f}"),
    "peak_memory_bytes": ("peak memory, bytes", "{:,.0f}"),
    "joules_per_token": ("joules a token", "{:.3g}"),
    "energy_covers": ("energy covers", "{}"),
    "average_power_watts": ("average power, W", "{:.0f}"),
    "throttled_seconds": ("throttled, s", "{:.0f}"),
    "gpu_idle_share": ("GPU idle", "{:.1%}"),
    "straggler_loss_share": ("lost to the slowest rank", "{:.1%}"),
    "slowest_rank": ("slowest rank", "{}"),
}
"""Of the summary, by key: what it is called, and its format. What a run does not have is left out."""
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}svg{width:100%;height:auto}
table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left;font-variant-numeric:tabular-nums}
th{font-weight:600}.figures{columns:2}.none{color:#777}"""
COSTLIEST = 10


def write_page(folder: Folder, entries: Sequence[dict[str, Any]], summary: Mapping[str, Any]) -> None:
    """Puts the page of the run in this folder there, as `report.html`. Raises OSError."""
    folder.put("report.html", run_page(entries, summary, _operations(folder)))


def run_page(
    entries: Sequence[dict[str, Any]],
    summary: Mapping[str, Any],
    operations: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page as HTML, from journal entries, the summary, and the costliest operations where steps were profiled."""
    shares = step_shares(entries)
    sections = [
        ("Loss", pictures.losses(entries), "No loss was measured."),
        ("Speed", pictures.speed(entries) + pictures.mfu(entries), "No speed was measured."),
        ("Where a step's time goes", pictures.step_parts(shares) + pictures.parts_over_time(entries), "Not measured."),
        ("Rank by time: own seconds a step", pictures.rank_heat(entries), "One worker: there is nothing to compare."),
        ("The machine", pictures.strips(entries), "No device was sampled."),
        ("Costliest operations", _table(operations), "Not profiled; --profile.tool torch does it."),
    ]
    advice = "".join(f"<li>{html.escape(text)}</li>" for text in advise(summary, shares))
    body = "".join(f"<h2>{title}</h2>{content or _nothing(none)}" for title, content, none in sections)
    name = html.escape(str(summary.get("run", "")))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style></head>'
        f"<body><h1>Run {name}</h1>{_figures(summary)}<h2>What to try next</h2><ul>{advice}</ul>{body}"
        "<p>Parts of a step are the host's time; on GPUs forward, backward and optimiser are the time to launch them.</p>"
        "</body></html>\n"
    )


def step_shares(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean share of the time by part of a step over all intervals, and the rest; empty where none was measured."""
    lines = {name: [value for _, value in series(entries, f"phase_{name}_share")] for name in PARTS}
    shares = {name: sum(values) / len(values) for name, values in lines.items() if values}
    return shares | {"rest": max(0.0, 1 - sum(shares.values()))} if shares else {}


def _figures(summary: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><th>{label}</th><td>{html.escape(form.format(summary[key]))}</td></tr>"
        for key, (label, form) in FIGURES.items()
        if summary.get(key) is not None
    ]
    return f'<div class="figures"><table>{"".join(rows)}</table></div>'


def _table(operations: Sequence[Mapping[str, Any]]) -> str:
    if not operations:
        return ""
    rows = [
        f"<tr><td>{html.escape(str(each['name']))}</td><td>{each['calls']:,}</td><td>{each['share']:.1%}</td></tr>"
        for each in operations[:COSTLIEST]
    ]
    return f"<table><tr><th>operation</th><th>calls</th><th>share of the time</th></tr>{''.join(rows)}</table>"


def _nothing(text: str) -> str:
    return f'<p class="none">{text}</p>'


def _operations(folder: Folder) -> list[dict[str, Any]]:
    """The costliest operations of the newest profile by PyTorch, where there is one."""
    profiles = folder / "profiles"
    names = sorted(name for name in profiles.names() if name.endswith("-operations.json")) if profiles.exists() else []
    return list(profiles.read_json(names[-1])) if names else []
