"""Small models with something in their optimisers, and checkpoints of them."""

from pathlib import Path

import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig, OptimizerConfig
from raystride.pipelines.data.feed.loader import Step
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import parse_step
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.retention import read_hint
from raystride.pipelines.train.checkpoint.train_state import TrainState, Updater
from raystride.pipelines.train.optimizer import build_optimizer

SHAPE = ModelConfig(layers=1, heads=2, hidden_size=8, context=6)


def train_model(seed: int, steps: int = 2, kind: str = "adamw") -> tuple[Decoder, Updater]:
    torch.manual_seed(seed)
    settings = OptimizerConfig(kind=kind, momentum=0.9 if kind == "sgd" else 0.0)  # type: ignore[arg-type]
    model = Decoder(SHAPE, 11)
    optimizer = build_optimizer(settings, model)
    for _ in range(steps):
        loss, _ = model(torch.randint(0, 11, (2, 6)), torch.randint(0, 11, (2, 6)))
        loss.backward()
        optimizer.update(1e-3)
        model.zero_grad()
    return model, optimizer


def save(folder: Path, step: int, best: bool = False, attempt: str = "a1", keep: int = 2) -> Decoder:
    model, optimizer = train_model(step)
    checkpoints = Checkpoints(Folder.from_uri(str(folder)), attempt, keep=keep, extra={"tokenizer/kind.json": b"{}"})
    best_step = step if best else parse_step(read_hint(checkpoints.folder, "best")) or 0
    state = TrainState(step=step, position=4 * step, fed_digest=step, best_step=best_step)
    checkpoints.save(model, optimizer, state, {"run": "r"}, best=best)
    checkpoints.wait_for_save()
    return model


def open_checkpoints(folder: Path | str, said: list[str] | None = None) -> Checkpoints:
    return Checkpoints(Folder.from_uri(str(folder)), "a2", keep=2, log=(said if said is not None else []).append)


def fed(checkpoints: Checkpoints, state: TrainState, digest: int, model: Decoder, optimizer: Updater) -> None:
    state.advance(Step(number=state.step, position=state.position, samples=4, micro_batches=[], digest=digest))
    checkpoints.save(model, optimizer, state, {}, best=False)
