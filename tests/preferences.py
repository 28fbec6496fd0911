"""A small model to start from, in Hugging Face's layout with a tokenizer that has a chat template, and pairs of answers.

base = write_base(folder); pairs = write_pairs(folder)
config = pair_settings(base, pairs, train=TrainConfig(steps=3))
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RecordConfig,
    SampleConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tokenizers import load_tokenizer, train_tokenizer
from raystride.pipelines.evaluate.export import export_hugging_face
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.system.storage.folder import Folder

SHAPE = ModelConfig(architecture="llama", layers=2, heads=2, hidden_size=16, ffn_size=32, context=48)
CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>")
TEXTS = ["what is the sum of 12 and 34?", "it is 46, and I am sure of it.", "no idea."] * 20


def write_base(folder: Path, *, chat: bool = False, seed: int = 1) -> Path:
    """The folder of a model whose weights say something; with `chat`, its tokenizer writes turns."""
    made = folder / "tokenizer"
    train_tokenizer(TokenizerConfig(kind="bpe", vocabulary_size=300), TEXTS, Folder.from_uri(str(made)), lambda _: None)
    if chat:
        content = json.loads((made / "tokenizer.json").read_text())
        first = len(content["model"]["vocab"])
        rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, name in enumerate(SPECIALS, first):
            content["added_tokens"].append({"id": number, "content": name, "special": True, **rules})
        (made / "ready.json").write_text(json.dumps(content))
        (made / "template.jinja").write_text(CHATML)
        ready = TokenizerConfig(kind="file", file=str(made / "ready.json"), end_token=SPECIALS[1])
        ready = replace(ready, chat_template=str(made / "template.jinja"))
        made = folder / "ready"
        train_tokenizer(ready, TEXTS, Folder.from_uri(str(made)), lambda _: None)
    encoder = load_tokenizer(Folder.from_uri(str(made)))
    torch.manual_seed(seed)
    model = Decoder(SHAPE, encoder.vocabulary_size)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    (folder / "run").mkdir()
    made.rename(folder / "run" / "tokenizer")
    opened = LoadedModel(
        Config(model=SHAPE), build_task(Config(model=SHAPE), None, {"tokenizer": encoder}), model, 0, Folder(f"{folder}/run")
    )
    base = Path(str(export_hugging_face(opened, Folder(f"{folder}/base"))))
    if chat:
        (base / "chat_template.jinja").write_text(CHATML)
    return base


def write_pairs(folder: Path, count: int = 60, *, chat: bool = False) -> Path:
    """JSON lines of pairs, in which the preferred answer says yes."""
    draw, rows = random.Random(0), []
    for number in range(count):
        prompt = f"is {number} {''.join(draw.choices('abc', k=draw.randint(1, 6)))}?"
        answers = " yes" * draw.randint(1, 3) + ".", f" no {draw.randint(0, 99)}"
        texts = [prompt, *answers]
        roles = ("user", "assistant", "assistant")
        fields = [[{"role": role, "content": text}] for role, text in zip(roles, texts, strict=True)] if chat else texts
        rows.append(dict(zip(("prompt", "chosen", "rejected"), fields, strict=True)))
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair_settings(base: Path, pairs: Path, **changes: Any) -> Config:
    """Settings of the task on these; `changes` replace whole sections."""
    config = Config(
        task="preference",
        data=DataConfig(source=str(pairs), validation_fraction=0.2),
        tokenizer=TokenizerConfig(kind="file", file=str(base / "tokenizer.json")),
        model=replace(SHAPE, init_from=str(base)),
        objective=ObjectiveConfig(beta=0.2),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=2, weight_decay=0.0),
        train=TrainConfig(steps=10, slots=4, slot_size=2, log_every=5),
        validation=ValidationConfig(every=5, samples=0),
        checkpoint=CheckpointConfig(every=5),
        record=RecordConfig(mlflow=False),
        sample=SampleConfig(tokens=0),
    )
    return replace(config, **changes)
