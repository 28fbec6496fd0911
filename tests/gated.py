"""A preparation that takes its time: of a source of six texts two are encoded at once, and the others when a gate opens.

flags = ["--data.source", str(write_source(folder)), "--task", "gated", "--plugins", write_plugin(gate)]
gate.touch()                                              # now the others are
"""

import json
from pathlib import Path

PARTS = 6
PLUGIN = """
import os, time
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride import register_task

@register_task("gated")
class Gated(LanguageModel):
    def encode(self, document):
        while document[0][:6] > "part 1" and not os.path.exists({gate!r}):
            time.sleep(0.05)
        return super().encode(document)
"""


def write_source(folder: Path) -> Path:
    """The source, a folder of files, each a part of a preparation and a quarter of a MiB large."""
    source = folder / "gated"
    source.mkdir(parents=True)
    for number in range(PARTS):
        (source / f"{number:02d}.txt").write_text("".join(f"part {number} line {line}\n" for line in range(14_000)))
    return source


def write_plugin(gate: Path) -> str:
    """The plug-in whose task waits for the file `gate`, beside which it lies, as the setting `plugins` names it."""
    file = gate.with_name("gated_task.py")
    file.write_text(PLUGIN.format(gate=str(gate)))
    return json.dumps([str(file)])
