"""Each peer's environment: pinned packages in a virtual environment of its own, made once and kept while the pins stay.

PyTorch stands first and pinned in every list, so that all peers and ours compute by the same one.

    python = make("lightning", Path(".peers"))                # .peers/lightning/bin/python
"""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.runs import Failed

TORCH = "torch==2.13.0"
PINS = {
    "nanogpt": (TORCH, "numpy==2.4.6", "requests==2.34.2"),
    "hugging_face": (TORCH, "numpy==2.4.6", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0"),
    "lightning": (TORCH, "numpy==2.4.6", "lightning==2.6.6"),
    "litgpt": (TORCH, "numpy==2.4.6", "litgpt==0.5.13"),
    "mosaic": (TORCH, "numpy==2.1.3", "transformers==4.57.6", "mosaicml-streaming==0.13.0"),
    "litdata": (TORCH, "numpy==2.4.6", "litdata==0.2.76"),
}
"""What is installed, by environment."""
WARM = {
    "nanogpt": "torch",
    "hugging_face": "torch, datasets, accelerate, transformers.trainer",
    "lightning": "torch, lightning",
    "litgpt": "torch, litgpt",
    "mosaic": "torch, transformers, boto3",
    "litdata": "torch, litdata",
}
"""Modules imported once in a new environment, since no figure should hold the first reading of its files."""
LIMIT_S = 1200


def make(name: str, folder: Path) -> Path:
    """The environment's Python, once its pins are installed. Raises Failed."""
    place = folder.resolve() / name
    python, kept, pins = place / "bin" / "python", place / "pins.txt", "\n".join(PINS[name])
    if kept.exists() and kept.read_text() == pins:
        return python
    print(f"  installing {', '.join(PINS[name])}", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(place))
    _run(str(python), "-m", "pip", "install", "--quiet", *PINS[name])
    _run(str(python), "-c", f"import {WARM[name]}")
    kept.write_text(pins)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise Failed(f"no environment: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
