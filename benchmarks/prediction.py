"""Batch prediction beside `transformers`' pipeline on the same exported weights; generation with the cache beside without.

Both continue the same prompts of several lengths, greedily and by equally many tokens, in batches of the same size; that
their texts agree is checked. Each uses the cores in its own manner: the pipeline is a process with as many threads, ours as
many workers of one thread, as `predict.py` has them. The pipeline in such workers stands beside both, and ours with products
in bfloat16, whose texts may differ. The model is a small Llama with fresh weights, its tokenizer a BPE trained on the
standard library. Without the cache, every token is computed from all tokens before it, by one thread.

    python -m benchmarks.prediction --rounds 5                 # rows a second, and tokens a second; 4 minutes on two cores
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch

from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from benchmarks.runs import small_text
from raystride.model.generate import choose_token, generate
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, DataConfig, ModelConfig, PredictorConfig, SampleConfig, TokenizerConfig
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tokenizers import Tokenizers
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.export import export_hugging_face
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.system.storage.folder import Folder

ROWS, NEW = 256, 32
_predictors: dict[str, Predictor]
_pipeline: Any
"""Of a worker."""
LONG = 256
"""Tokens of the generation with and without the cache."""


def build(folder: Path) -> LoadedModel:
    """A model with fresh weights, as if it had been trained; the same ones each time."""
    folder.mkdir(exist_ok=True)
    config = Config(
        data=DataConfig(source=str(small_text(folder)), kind="text", validation="tail"),
        tokenizer=TokenizerConfig(kind="bpe", vocabulary_size=4096),
        model=ModelConfig(architecture="llama", layers=6, heads=6, hidden_size=384, context=512),
    )
    prepared = prepare(RunContext(config, Folder(str(folder)), log=lambda _: None), build_task(config), on_ray=False)
    torch.manual_seed(0)
    task = build_task(config, prepared.manifest.facts, Tokenizers(prepared.folder, ["tokenizer"]))
    return LoadedModel(config, task, task.build_model().eval(), 0, prepared.folder)


def prompts(opened: LoadedModel, rows: int) -> list[str]:
    """Pieces of the text, of 4 to 40 words."""
    words = Path(opened.config.data.source).read_text().split()
    return [" ".join(words[number * 50 : number * 50 + 4 + number * 7 % 37]) for number in range(rows)]


def _load(folder: Path, batch: int) -> None:
    """Makes this process a worker."""
    global _predictors, _pipeline
    torch.set_num_threads(1)
    opened = build(folder / str(os.getpid()))
    _pipeline = open_pipeline(opened, folder / str(os.getpid()), batch)
    _predictors = {
        precision: Predictor(
            opened,
            PredictorConfig(run="benchmark", batch=batch, threads=1, precision=precision),
            SampleConfig(tokens=NEW, temperature=0.0),
        )
        for precision in ("fp32", "bf16")
    }


def _continue(texts: list[str], precision: str = "fp32") -> list[str]:
    """What a worker does with the rows of a part."""
    return [row["continuation"] for row in _predictors[precision].predict((text,) for text in texts)]


def _run_pipeline(texts: list[str]) -> list[str]:
    """What the pipeline does with them."""
    rows = _pipeline(texts, max_new_tokens=NEW, do_sample=False, return_full_text=False)
    return [row[0]["generated_text"] for row in rows]


def in_workers(
    function: Callable[[list[str]], list[str]], pool: Pool, workers: int, texts: list[str], to: list[str]
) -> float:
    """Rows a second of the workers, each of which has a part; the continuations are left in `to`."""
    part = -(-len(texts) // workers)
    began = time.perf_counter()
    parts = pool.map(function, [texts[first : first + part] for first in range(0, len(texts), part)], chunksize=1)
    seconds = time.perf_counter() - began
    to[:] = [text for rows in parts for text in rows]
    return len(texts) / seconds


def pipeline_rate(pipeline: Any, texts: list[str]) -> float:
    """Rows a second of the pipeline in this process."""
    began = time.perf_counter()
    pipeline(texts, max_new_tokens=NEW, do_sample=False, return_full_text=False)
    return len(texts) / (time.perf_counter() - began)


def open_pipeline(opened: LoadedModel, folder: Path, batch: int) -> Any:
    """`transformers`' text generation with the exported model; prompts are padded on the left, as it asks for."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    place = str(export_hugging_face(opened, Folder(str(folder / "hugging_face"))))
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    model.generation_config.max_length = None
    return transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", batch_size=batch)


def cached_rate(model: Decoder, row: list[int]) -> float:
    """Tokens a second with the key-value cache."""
    began = time.perf_counter()
    made = sum(1 for _ in generate(model, [row], tokens=LONG, temperature=0.0))
    return made / (time.perf_counter() - began)


def uncached_rate(model: Decoder, row: list[int]) -> float:
    """Tokens a second where each is computed from all before it."""
    ids = torch.tensor([row])
    began = time.perf_counter()
    with torch.no_grad():
        for _ in range(LONG):
            logits = model.logits(model.hidden(ids)[:, -1])
            ids = torch.cat((ids, choose_token(logits, temperature=0.0, top_k=0, top_p=1.0)[:, None]), 1)
    return LONG / (time.perf_counter() - began)


def main(given: argparse.Namespace) -> None:
    """Measures both, and reports."""
    torch.set_num_threads(given.threads)
    found = machine(f"{given.threads} threads of the pipeline, {given.threads} workers of ours")
    print(machine_line(found, ("torch", "transformers")))
    with (
        tempfile.TemporaryDirectory(prefix="prediction-") as scratch,
        get_context("spawn").Pool(given.threads, _load, (Path(scratch), given.batch)) as pool,
    ):
        opened = build(Path(scratch) / "here")
        pipeline, texts = open_pipeline(opened, Path(scratch), given.batch), prompts(opened, given.rows)
        theirs: list[str] = []
        ours: list[str] = []
        size = sum(parameter.numel() for parameter in opened.model.parameters())
        print(f"{size / 1e6:.1f} M parameters, {given.rows} prompts, {NEW} tokens each, batches of {given.batch}")
        ways = {
            "transformers": partial(pipeline_rate, pipeline, texts),
            "transformers, workers": partial(in_workers, _run_pipeline, pool, given.threads, texts, theirs),
            "ours, workers": partial(in_workers, _continue, pool, given.threads, texts, ours),
            "ours, bf16": partial(in_workers, partial(_continue, precision="bf16"), pool, given.threads, texts, []),
        }
        for way in ways.values():
            way()  # the first of a process pays for allocations
        rates = take_turns(ways, given.rounds, lambda _, rate: f"{rate:.1f} rows/s")
        alike = sum(one == other for one, other in zip(ours, theirs, strict=True))
        print(f"{alike} of {given.rows} continuations are the same")
        torch.set_num_threads(1)
        row = opened.encoder.encode(texts[0]).tolist()
        steps = {
            "without cache": partial(uncached_rate, opened.decoder, row),
            "with cache": partial(cached_rate, opened.decoder, row),
        }
        tokens = take_turns(steps, given.rounds, lambda _, rate: f"{rate:.0f} tokens/s")
    compared = [
        Comparison("rows a second", rates, peer="transformers", aims={"ours, workers": "at least 2"}),
        Comparison(
            f"tokens a second, of {LONG}", tokens, peer="without cache", aims={"with cache": "at least 5"}, form=".0f"
        ),
    ]
    report(given, found, compared, alike=alike)


if __name__ == "__main__":
    parser = command_line("prediction", __doc__, rounds=5)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"prompts (default {ROWS})")
    parser.add_argument("--batch", type=int, default=32, help="prompts side by side, of both (default 32)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the pipeline, workers of ours (default 2)")
    main(parser.parse_args())
