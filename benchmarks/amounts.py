"""The preparation of some hundred megabytes beside what people would write: processor seconds, their ratio, and peak memory.

    bytes       JSON lines with the text in a nested field, bytes as tokens; a loop over json.loads and numpy
    tokenizer   the same with a tokenizer.json of 4,096; encode_batch_fast of 1,000 lines
    pictures    WebDataset, PNG of 24 x 24; tarfile and Pillow
    photos      the same of JPEG of 640 x 480, scaled to 24 x 24

Each run is a process of its own, timed whole, and the two take turns. Processor seconds are of the process and all that it
waits for; peak memory is of the largest of them.

    python -m benchmarks.amounts                               # some four minutes on two cores
    python -m benchmarks.amounts --rows bytes --mb 1000 --rounds 1
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.pairs import Comparison, command_line, machine, machine_line, ratio, report, take_turns

PICTURES_A_MB, PHOTOS_A_MB = 24, 2
"""By the megabytes of `--mb`."""
_VOCABULARY = 4096
_WORDS = 20_000


def write_lines(folder: Path, megabytes: int) -> None:
    """Files of 8 MB: Zipf-like words, some 2,000 characters a document."""
    random = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    words = np.array([random.choice(letters, random.integers(2, 10)).tobytes().decode() for _ in range(_WORDS)])
    weights = 1 / np.arange(1, _WORDS + 1)
    for number in range(max(1, megabytes // 8)):
        with (folder / f"{number:04}.jsonl").open("w") as file:
            while file.tell() < 8e6:
                for chosen in random.choice(words, (100, 330), p=weights / weights.sum()):
                    file.write(json.dumps({"id": 0, "data": {"text": " ".join(chosen)}}) + "\n")


def write_pictures(folder: Path, count: int, height: int, width: int, kind: str) -> None:
    """A tar of so many pictures of ten classes."""
    from PIL import Image

    random = np.random.default_rng(0)
    with tarfile.open(folder / "000.tar", "w") as tar:
        for number in range(count):
            stream = io.BytesIO()
            pixels = random.integers(0, 256, (24, 24, 3), np.uint8)  # enlarged, as noise is no photograph
            Image.fromarray(pixels).resize((width, height)).save(stream, kind)
            for ending, content in ((kind.lower(), stream.getvalue()), ("cls", str(number % 10).encode())):
                info = tarfile.TarInfo(f"{number:07}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def prepare_ours(settings: dict[str, Any], source: Path, out: Path) -> None:
    """Prepares in this process."""
    from raystride.pipelines.config import Config
    from raystride.pipelines.config.parse import load_settings
    from raystride.pipelines.data.prepare.prepare import prepare
    from raystride.pipelines.data.prepare.run_context import RunContext
    from raystride.pipelines.data.tasks import build_task
    from raystride.pipelines.system.storage.folder import Folder

    config = load_settings(Config, settings | {"data.source": str(source)}).settings
    prepare(RunContext(config, Folder(str(out)), log=lambda _: None), build_task(config), on_ray=False)


def bytes_by_hand(source: Path, out: Path) -> None:
    """A loop over lines."""
    end = np.array([256], np.uint16)
    with (out / "ids.bin").open("wb") as file:
        for path in sorted(source.glob("*.jsonl")):
            ids = []
            with path.open() as lines:
                for line in lines:
                    text = json.loads(line)["data"]["text"]
                    ids += [np.frombuffer(text.encode(), np.uint8).astype(np.uint16), end]
            np.concatenate(ids).tofile(file)


def tokens_by_hand(source: Path, out: Path) -> None:
    """The fastest call of tokenizers, a thousand lines at a time, in one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(source.parent / "tokenizer" / "tokenizer.json"))
    end = encoder.get_vocab()["<|end|>"]
    with (out / "ids.bin").open("wb") as file:
        for path in sorted(source.glob("*.jsonl")):
            texts = [json.loads(line)["data"]["text"] for line in path.read_text().splitlines()]
            for first in range(0, len(texts), 1000):
                found = encoder.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
                np.concatenate([np.array([*encoding.ids, end], np.uint16) for encoding in found]).tofile(file)


def pictures_by_hand(source: Path, out: Path) -> None:
    """Pixels and labels of a tar."""
    from PIL import Image

    with (out / "pixels.bin").open("wb") as file:
        for path in sorted(source.glob("*.tar")):
            with tarfile.open(path) as tar:
                for info in tar:
                    content = tar.extractfile(info).read()  # type: ignore[union-attr]
                    if info.name.endswith("cls"):
                        file.write(bytes([int(content)]))
                    else:
                        file.write(Image.open(io.BytesIO(content)).convert("RGB").resize((24, 24)).tobytes())


@dataclass(frozen=True)
class Row:
    """An amount of data, and how it is prepared by both."""

    write: Callable[[Path, int], None]
    """(folder, megabytes of `--mb`)"""
    settings: dict[str, Any]
    by_hand: Callable[[Path, Path], None]


_PICTURES = {"task": "images", "data.validation": "tail"}
_TEXT = {"data.kind": "json", "data.column": "data.text"}
ROWS = {
    "bytes": Row(write_lines, _TEXT | {"tokenizer.kind": "bytes"}, bytes_by_hand),
    "tokenizer": Row(write_lines, _TEXT | {"tokenizer.kind": "file"}, tokens_by_hand),
    "pictures": Row(
        lambda folder, mb: write_pictures(folder, PICTURES_A_MB * mb, 24, 24, "PNG"), _PICTURES, pictures_by_hand
    ),
    "photos": Row(
        lambda folder, mb: write_pictures(folder, PHOTOS_A_MB * mb, 480, 640, "JPEG"),
        _PICTURES | {"data.image_size": [3, 24, 24]},
        pictures_by_hand,
    ),
}


class Run(NamedTuple):
    """What a run took."""

    seconds: float
    """Of processors."""
    peak_mb: float


def run_once(way: str, row: str, source: Path) -> Run:
    """Prepares in a process of its own."""
    out = Path(tempfile.mkdtemp(prefix="amounts-"))
    command = [sys.executable, "-m", "benchmarks.amounts", "--one", way, row, str(source), str(out)]
    with subprocess.Popen(command) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    shutil.rmtree(out)
    if process.returncode:
        raise SystemExit(f"{way} of {row} failed")
    return Run(used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3)


def train_tokenizer(folder: Path, source: Path) -> None:
    """A tokenizer.json of the first file's texts."""
    from raystride.pipelines.config import TokenizerConfig
    from raystride.pipelines.data.tokenizers import train_tokenizer as train
    from raystride.pipelines.system.storage.folder import Folder

    with next(iter(sorted(source.glob("*.jsonl")))).open() as lines:
        texts = (json.loads(line)["data"]["text"] for line in lines)
        train(TokenizerConfig(vocabulary_size=_VOCABULARY), texts, Folder(str(folder)), lambda _: None)


def measure(row: str, given: argparse.Namespace) -> tuple[Comparison, dict[str, float]]:
    """Runs both ways in turn; the seconds, and the peak memory of each in MB."""
    with tempfile.TemporaryDirectory(prefix="amounts-") as place:
        (source := Path(place) / "source").mkdir()
        ROWS[row].write(source, given.mb)
        if row == "tokenizer":
            train_tokenizer(Path(place) / "tokenizer", source)
        size = sum(path.stat().st_size for path in source.iterdir()) / 1e6
        ways = {way: partial(run_once, way, row, source) for way in ("script", "ours")}
        results = take_turns(ways, given.rounds)
    seconds = {way: [run.seconds for run in runs] for way, runs in results.items()}
    aims = {"ours": "at most 2.5"} if row == "bytes" else {}
    peaks = {way: max(run.peak_mb for run in runs) for way, runs in results.items()}
    found = ratio(seconds["ours"], seconds["script"]).text(".2f")
    print(f"{row:<10} {size:,.0f} MB: ratio {found}, peak {peaks['ours']:,.0f} and {peaks['script']:,.0f} MB", flush=True)
    return Comparison(f"{row}, {size:,.0f} MB: processor seconds", seconds, peer="script", aims=aims), peaks


def main() -> None:
    """Parses the command line and measures."""
    parser = command_line("amounts", __doc__, rounds=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    parser.add_argument("--mb", type=int, default=250, help="megabytes of text; pictures by it (default 250)")
    parser.add_argument("--one", nargs=4, metavar=("WAY", "ROW", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        way, row, source, out = given.one
        if way == "script":
            ROWS[row].by_hand(Path(source), Path(out))
        else:
            file = {"tokenizer.file": f"{Path(source).parent}/tokenizer/tokenizer.json"} if row == "tokenizer" else {}
            prepare_ours(ROWS[row].settings | file, Path(source), Path(out))
        return
    found = machine("one process at a time")
    print(machine_line(found, ("tokenizers", "pyarrow")), flush=True)
    measured = {row: measure(row, given) for row in given.rows}
    comparisons, peaks = zip(*measured.values(), strict=True)
    report(given, found, comparisons, peak_mb=dict(zip(measured, peaks, strict=True)))


if __name__ == "__main__":
    main()
