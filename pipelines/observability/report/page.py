"""A run's HTML page: one self-contained file on how well the run used its machine, from its journal.

    write_page(folder, gather_figures(stream_entries(folder)), summary)   # as `report.html`

No script, font or picture is loaded from outside.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from raystride.pipelines.observability.pages import (
    bullet_list,
    empty_note,
    heading,
    html_page,
    html_table,
    paragraph,
    preformatted_text,
)
from raystride.pipelines.observability.report import pictures
from raystride.pipelines.observability.report.advice import suggest_changes
from raystride.pipelines.observability.report.figures import Figures
from raystride.pipelines.observability.report.origin import Origin, load_origin
from raystride.pipelines.observability.report.run_figures import list_metrics, list_run_figures, rate_unit
from raystride.pipelines.system.storage.folder import Folder

PAGE_FIGURES = {
    "precision": ("precision", "{}"),
    "products": ("linear products", "{}"),
    "energy_covers": ("energy covers", "{}"),
    "straggler_loss_share": ("lost to the slowest rank", "{:.1%}"),
    "slowest_rank": ("slowest rank", "{}"),
}
"""Label and format of the figures that the page alone has, by their key in the summary."""
MAX_OPERATIONS = 10
MAX_CONFUSIONS, MAX_ANSWERS, MAX_TEXT_CHARACTERS = 8, 6, 160
"""Maximum of pairs of labels, of wrong and of right answers, and of their characters."""


def write_page(folder: Folder, figures: Figures, summary: Mapping[str, Any]) -> None:
    """Writes the page of the run as `report.html` to its folder. Raises OSError."""
    folder.put("report.html", run_page(figures, summary, _load_operations(folder), load_origin(folder)))


def run_page(
    figures: Figures,
    summary: Mapping[str, Any],
    operations: Sequence[Mapping[str, Any]] = (),
    origin: Origin | None = None,
) -> str:
    """Returns the page as HTML, from a journal's figures, the summary, the run's origin, and the costliest operations if
    steps were profiled.
    """
    origin = origin or Origin()
    shares = figures.part_shares
    optional = [
        ("Loss", pictures.draw_losses(figures), "loss"),
        ("Quality", pictures.draw_metrics(figures), ""),
        ("Data", bullet_list(origin.data_lines) if origin.data_lines else "", ""),
        ("Confusion of labels", _confusion(origin.answers), ""),
        ("Answers on validation documents", _answers_table(origin.answers), ""),
        ("Load of experts", pictures.draw_expert_heatmap(figures), ""),
        ("Norms by part of the network", pictures.draw_norms(figures), ""),
        ("Speed", pictures.draw_speed(figures, rate_unit(summary.get("unit"))) + pictures.draw_mfu(figures), "speed"),
        (
            "Time per step by part",
            pictures.draw_step_parts(shares) + pictures.draw_parts_over_time(figures),
            "time per step",
        ),
        ("Compute time per step, by worker", pictures.draw_rank_heatmap(figures), "workers side by side (there was one)"),
        ("Hardware", pictures.draw_device_strips(figures), "hardware"),
        ("Most expensive operations", _operations_table(operations), "operations (--profile.tool torch records them)"),
    ]
    body = [part for title, content, _ in optional if content for part in (heading(title), content)]
    missing = [note for _, content, note in optional if note and not content]
    return html_page(
        f"Run {summary.get('run', '')}",
        paragraph(_headline(figures, summary, origin)),
        *(paragraph(f"The journal is damaged: {damage}.") for damage in figures.damages),
        html_table((), _figure_rows(summary) + _majority_row(origin.answers)),
        heading("What to try next"),
        bullet_list(suggest_changes(summary, shares, figures.losses, origin.config, origin.answers)),
        *body,
        *([paragraph(f"Not recorded: {', '.join(missing)}.")] if missing else []),
        heading("Provenance"),
        html_table((), origin.list_facts(figures.began), texts=2),
        heading("Changed settings"),
        html_table(["setting", "value", "default"], origin.changed_settings, texts=3)
        if origin.changed_settings
        else empty_note("None, or they are not known."),
        *([heading("Sample"), preformatted_text(origin.sample)] if origin.sample.strip() else []),
        paragraph(
            "Parts of a step are the host's time; on GPUs forward, backward and optimiser are that of launching them."
        ),
    )


def _headline(figures: Figures, summary: Mapping[str, Any], origin: Origin) -> str:
    """Returns one sentence with the result: task, data, steps, the task's metric, the best validation."""
    config = origin.config
    task = f"{config.task} on {origin.data_source}, " if config and origin.data_source else ""
    ended = f"{summary.get('status', 'not ended')} after {summary.get('steps') or 0:,} steps"
    results = [f"{figure.label} {figure.text}" for figure in list_metrics(summary)[:2]]
    if validated := figures.points("val_loss"):
        step, lowest = min(validated, key=lambda point: (point[1], point[0]))
        results.append(f"lowest validation loss {lowest:.4g} at step {step:,}")
    return f"{task}{ended}: {', '.join(results) or 'nothing was validated'}."


def _figure_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Returns label and text of the run's figures, then how it computed."""
    known = {key: summary[key] for key in PAGE_FIGURES if summary.get(key) is not None}
    more = [[PAGE_FIGURES[key][0], PAGE_FIGURES[key][1].format(value)] for key, value in known.items()]
    return [[figure.label, figure.text] for figure in list_run_figures(summary)] + more


def _majority_row(answers: Mapping[str, Any]) -> list[list[str]]:
    """Returns the accuracy of always giving the most frequent label, beside which a classifier's is to be read."""
    rows = [sum(row) for row in answers.get("confusion", ())]
    if not sum(rows):
        return []
    label = answers["labels"][rows.index(max(rows))]
    return [
        ["accuracy of always saying " + repr(label), f"{max(rows) / sum(rows):.4f}, {max(rows):,} of {sum(rows):,} rows"]
    ]


def _confusion(answers: Mapping[str, Any]) -> str:
    """Returns a classifier's confusion matrix, and which labels it confuses most often."""
    if not answers:
        return ""
    labels, confusion = answers["labels"], answers["confusion"]
    wrong = [
        (count, labels[true], labels[given], count / sum(row))
        for true, row in enumerate(confusion)
        for given, count in enumerate(row)
        if count and true != given
    ]
    rows = [
        [true, given, f"{count:,}", f"{share:.1%}"]
        for count, true, given, share in sorted(wrong, key=lambda each: -each[0])[:MAX_CONFUSIONS]
    ]
    head = ["true", "predicted", "samples", "of this label"]
    note = paragraph(f"{sum(map(sum, confusion)):,} validation samples at step {answers['step']:,}.")
    return note + pictures.draw_confusion(labels, confusion) + (html_table(head, rows, texts=2) if rows else "")


def _answers_table(answers: Mapping[str, Any]) -> str:
    """Returns some of a classifier's answers: wrong ones that it was surest of, and right ones that it was least sure of."""
    documents = [document for document in answers.get("documents", ()) if document["text"]]
    wrong = [document for document in documents if document["answer"] != document["label"]]
    right = [document for document in documents if document["answer"] == document["label"]]
    wrong.sort(key=lambda document: -document["probability"])
    right.sort(key=lambda document: document["probability"])
    rows = [
        [_shorten(document["text"]), document["label"], document["answer"], f"{document['probability']:.0%}"]
        for document in (*wrong[:MAX_ANSWERS], *right[:MAX_ANSWERS])
    ]
    note = paragraph(
        f"{len(wrong)} of the first {len(documents)} validation documents are answered wrong: the surest of these answers "
        "first, then the right ones that were least sure."
    )
    return note + html_table(["text", "label", "predicted", "probability"], rows, texts=3) if rows else ""


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT_CHARACTERS else f"{line[:MAX_TEXT_CHARACTERS]}..."


def _operations_table(operations: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [str(operation["name"]), f"{operation['calls']:,}", f"{operation['share']:.1%}"]
        for operation in operations[:MAX_OPERATIONS]
    ]
    return html_table(["operation", "calls", "share of the time"], rows) if rows else ""


def _load_operations(folder: Folder) -> list[dict[str, Any]]:
    """Returns the costliest operations of the newest PyTorch profile; empty if there is none."""
    profiles = folder / "profiles"
    names = sorted(name for name in profiles.names() if name.endswith("-operations.json")) if profiles.exists() else []
    return list(profiles.read_json(names[-1])) if names else []
