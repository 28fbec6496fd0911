"""Names of a run's figures in MLflow, so that its page begins with the losses.

MLflow draws a section for each prefix of a metric's name up to its last slash, sorted by name, and those without a prefix at
the end. So `train_loss` and `val_loss` of the journal are `train/loss` and `val/loss` there, `system/...` has a page of its
own, and nothing else has a prefix. Figures that are measured once, at the start, are parameters. A run of an earlier version
keeps the names of the journal.

    section_name("train_loss"), section_name("val_recall/yes")        # "train/loss", "val/recall/yes"
    section_name("tokens_per_second"), section_name("test_recall/a")  # "tokens_per_second", "test_recall.a"
    is_measured_once("start/build_s")                                 # True
"""

import re

SECTIONS = ("train", "val")
IN_TRAIN_SECTION = frozenset(
    (
        *("clipped_share", "dropped_steps", "epoch", "gradient_norm", "learning_rate", "left_out_slots", "loss_scale"),
        *("loss_spikes", "tokens_seen"),
    )
)
SYSTEM_PREFIX = "system/"
START_PREFIX = "start/"
MAX_NAME_LENGTH = 250
"""MLflow's limit."""


def section_name(figure: str) -> str:
    """Returns the name in MLflow of a figure of the journal."""
    if figure.startswith(SYSTEM_PREFIX):
        return figure
    if figure in IN_TRAIN_SECTION:
        return f"train/{figure}"
    for section in SECTIONS:
        if figure.startswith(f"{section}_"):
            return f"{section}/{figure.removeprefix(f'{section}_')}"
    return figure.replace("/", ".")


def is_measured_once(figure: str) -> bool:
    """Returns whether a figure is measured once in an attempt, at its start, and is a parameter in MLflow."""
    return figure.startswith(START_PREFIX) or figure == "seconds_to_first_step"


def metric_name(key: str) -> str:
    """Returns the key as a clean relative path in characters that every MLflow store accepts."""
    parts = [re.sub(r"[^\w.\-: ]", "_", part, flags=re.ASCII).replace(":", "_") for part in key.split("/")]
    return "/".join(part for part in parts if part.strip(". "))[:MAX_NAME_LENGTH] or "unnamed"
