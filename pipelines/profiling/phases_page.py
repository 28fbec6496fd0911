"""What a profile's page says of the phases, in words and as a table.

parts = [heading("Phases"), phase_part({"forward": 0.4, ...}, elapsed=1.0, steps=10, on_gpu=False)]
"""

from pipelines.pages import paragraph, table
from pipelines.phases import PARTS, PHASES


def phase_part(seconds: dict[str, float], elapsed: float, steps: int, on_gpu: bool) -> str:
    """Where the host's time went, by phase: a sentence and a table. `elapsed` is that of all steps of the window."""
    longest = max(PARTS, key=lambda name: seconds.get(name, 0.0))
    text = (
        f"A step took {elapsed / steps * 1e3:.2f} ms by the host's clock, while being watched, which slows it down. "
        f"Most of it went into {longest}: {seconds.get(longest, 0.0) / elapsed:.0%}."
    )
    if on_gpu:
        text += " On a GPU the host's time of forward and backward is that of launching: the device works behind."
    rows = [
        [name, f"{seconds[name] / steps * 1e3:.3f}", f"{seconds[name] / elapsed:.1%}"]
        for name in PHASES
        if seconds.get(name, 0.0) > 0
    ]
    note = "step contains slot, reduce and update; slot contains forward and backward."
    return paragraph(text) + table(["phase", "ms a step", "share"], rows) + paragraph(note)
