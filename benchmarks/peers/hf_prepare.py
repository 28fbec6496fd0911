"""A text to numbers by `datasets` as its documentation writes it: `load_dataset`, `map`, `save_to_disk`.

python -m benchmarks.peers.hf_prepare input.txt out
"""

import sys
from pathlib import Path

from datasets import load_dataset


def prepare(text: Path, folder: Path) -> None:
    """Lines of a text as one number a character, in Arrow files in a folder."""
    number = {character: i for i, character in enumerate(sorted(set(text.read_text())))}

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [[number[c] for c in line] for line in batch["text"]]}

    lines = load_dataset("text", data_files=str(text), split="train", keep_linebreaks=True, cache_dir=str(folder / "cache"))
    lines.map(encode, batched=True, num_proc=2, remove_columns="text").save_to_disk(str(folder / "ids"))


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))
