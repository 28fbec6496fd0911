"""The networks of all tasks in shards: the same gradients, texts and translations as in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from raystride.model.beam import translate
from raystride.model.classifier import Classifier
from raystride.model.convnet import ConvNet
from raystride.model.generate import generate
from raystride.model.transformer import Decoder
from raystride.model.translator import Translator
from raystride.pipelines.config import ModelConfig, OptimizerConfig
from raystride.pipelines.train.optimizer import build_optimizer
from tests.bases import ENCODERS
from tests.distributed import run_distributed

SHAPE = ModelConfig(architecture="original", layers=2, heads=2, hidden_size=16, context=8, pooling="attention")
IDS, LENGTHS = torch.arange(48).view(8, 6) * 7 % 11, torch.tensor([6, 3, 1, 5, 2, 6, 4, 4])
LABELS = torch.arange(8) % 3
IMAGES = torch.arange(8 * 75).view(8, 3, 5, 5).to(torch.uint8)
IDS_AFTER = IDS.roll(-1, 1)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "decoder": (lambda: Decoder(SHAPE, 11), (IDS, IDS_AFTER)),
    "classifier": (lambda: Classifier(SHAPE, 11, 3), (IDS, LENGTHS, LABELS)),
    "bert": (lambda: Classifier(ENCODERS["bert"], 11, 3), (IDS, LENGTHS, LABELS)),
    "modernbert": (lambda: Classifier(ENCODERS["modernbert"], 11, 3), (IDS, LENGTHS, LABELS)),
    "translator": (lambda: Translator(SHAPE, 11), (IDS, LENGTHS, IDS, IDS_AFTER)),
    "convnet": (lambda: ConvNet((3, 5, 5), 3, channels=(4, 6), hidden=(8,)), (IMAGES, LABELS)),
}
SAMPLE: dict[str, Any] = {"tokens": 7, "temperature": 0}
OPTIONS: dict[str, Any] = {"start_id": 0, "end_id": 1, "longest": 6, "beams": 2}


def _build(build: Callable[[], nn.Module]) -> nn.Module:
    """Returns the same network in every process, with weights large enough for distinct texts."""
    torch.manual_seed(0)
    model = build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return model


def _norms_and_words(rank: int, world: int, kind: str) -> tuple[list[float], list[list[int]], list[list[int]]]:
    """Returns each network's gradient norm, and the outputs of decoder and translator, the latter for the worker's own
    sentences."""
    from raystride.pipelines.train.strategies.deepspeed import ZeRO
    from raystride.pipelines.train.strategies.fsdp import FullySharded

    norms = []
    for build, batch in CASES.values():
        device = torch.device("cpu")
        strategy = FullySharded(device, rank, world) if kind == "fsdp" else ZeRO(device, rank, world, stage=3)
        model, _ = strategy.prepare_model(_build(build), partial(build_optimizer, OptimizerConfig()))
        strategy.zero_gradients()
        loss, _ = model(*(tensor[rank::world] for tensor in batch))
        strategy.backward(loss, torch.zeros(1), slot=rank, last=True)
        norms.append(strategy.gradient_norm().item())
        if isinstance(model, Decoder):
            texts = list(generate(model, [[3], [5, 4]], **SAMPLE))
        if isinstance(model, Translator):
            part = slice(0, 1) if rank else slice(1, 8)
            translations = translate(model, IDS[part], LENGTHS[part], finish_together=True, **OPTIONS)
    return norms, texts, translations


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_shards_change_nothing(kind: str) -> None:
    expected = []
    for build, batch in CASES.values():
        model = _build(build)
        model(*batch)[0].backward()
        expected.append(float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()))
        if isinstance(model, Decoder):
            texts = list(generate(model, [[3], [5, 4]], **SAMPLE))
        if isinstance(model, Translator):
            written = translate(model, IDS, LENGTHS, **OPTIONS)
    first, second = run_distributed(_norms_and_words, 2, kind)
    # fp32 sums in another order.
    assert first[0] == pytest.approx(expected, rel=1e-5)
    assert second[0] == pytest.approx(expected, rel=1e-5)
    assert first[1] == second[1] == texts
    assert second[2] + first[2] == written
