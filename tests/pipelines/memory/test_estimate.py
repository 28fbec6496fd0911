"""The memory that a worker is told to need, beside what it then holds."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.storages import Storages, size_of
from raystride.model.classifier import Classifier
from raystride.model.convnet import ConvNet
from raystride.model.shape import classifier_parameters, convnet_parameters, count_parameters, translator_parameters
from raystride.model.transformer import Decoder
from raystride.model.translator import Translator
from raystride.pipelines.config import Config, Model, Scaling, Train
from raystride.pipelines.memory.activations import Arithmetic
from raystride.pipelines.memory.estimate import MemoryEstimate, estimate
from raystride.pipelines.memory.networks import network_of
from raystride.pipelines.strategies.recompute import recompute
from tests.tiny import tiny


def _config(model: Model, **train: Any) -> Config:
    return replace(tiny(Path("text.txt")), model=model, train=Train(steps=1, **train))


def _told(config: Config, words: int = 300, workers: int = 1, device: str = "cpu") -> MemoryEstimate:
    told = estimate(config, _facts(words), workers=workers, device=device)
    assert told
    return told


def _facts(words: int) -> dict[str, Any]:
    return {"vocabulary_size": words, "target_vocabulary_size": words // 2, "labels": list("abcd"), "image": (3, 16, 20)}


def _drawn(seed: int) -> tuple[Config, int]:
    """A small decoder of any kind, and a vocabulary."""
    draw = random.Random(seed)
    heads = draw.choice([2, 4])
    model = Model(
        flavour=draw.choice(["gpt2", "llama"]),
        layers=draw.randint(1, 5),
        heads=heads,
        kv_heads=draw.choice([0, heads // 2]),
        width=heads * 2 * draw.randint(4, 24),
        feed_forward=draw.choice([0, 64, 300]),
        context=draw.choice([16, 50, 100]),
        dropout=draw.choice([0.0, 0.1]),
    )
    if model.flavour == "gpt2":
        model = replace(model, bias=draw.random() < 0.5)
    else:
        model = replace(model, head_size=draw.choice([0, 0, 8, 48]))
    model = replace(model, qkv_bias=draw.random() < 0.3, qk_norm=draw.random() < 0.5, tied=draw.choice([None, False, True]))
    model = replace(model, norm=draw.choice(["auto", "auto", "post"]))
    if model.flavour == "gpt2" and draw.random() < 0.3:
        model = replace(model, flavour="original")
    checkpointing = draw.choice(["none", "none", "selective", "full"])
    train: dict[str, Any] = {"slots": draw.randint(1, 3), "slot_size": 2, "activation_checkpointing": checkpointing}
    return _config(model, **train), draw.choice([50, 300, 2000])


def _of_gemma(seed: int) -> tuple[Config, int]:
    """The same with norms, gate, embeddings and windows of Gemma."""
    config, words = _drawn(seed)
    own: dict[str, Any] = {"norm": "sandwich", "gate": "gelu", "scaled_embedding": True, "query_scalar": 9, "window": 5}
    own |= {"flavour": "llama", "bias": False, "out_bias": seed % 2 == 0, "dropout": 0.0, "qk_norm": seed % 3 == 0}
    model = replace(config.model, **own)
    return replace(config, model=replace(model, logit_softcap=30.0 * (seed % 2), softcap=50.0 * (seed % 2))), words


def _of_task(config: Config, task: str, seed: int) -> Config:
    """The same settings for another task, with what is particular to it drawn."""
    draw = random.Random(seed)
    model = replace(
        config.model,
        pooling=draw.choice(["mean", "first", "attention", *["windows"] * (task == "classification")]),
        windows=draw.choice([(3, 4, 5), (2,)]),
        window_channels=draw.choice([10, 100]),
        encoder_layers=draw.randint(0, 3),
        channels=draw.choice([(8,), (8, 16), (4, 8, 8, 16, 16)]),
        hidden=draw.choice([(), (40,), (200, 60)]),
    )
    if task == "classification" and model.pooling == "windows" and draw.random() < 0.5:
        model = replace(model, layers=0)
    return replace(config, task=task, model=model, tokenizer=replace(config.tokenizer, shared=draw.random() < 0.5))


def _built(config: Config, words: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The network of a task, and the longest micro-batch that it may get."""
    shape, batch = config.model, config.train.batch
    ids = torch.randint(0, words // 2, (batch, shape.context))
    lengths, labels = torch.randint(1, shape.context + 1, (batch,)), torch.arange(batch) % 4
    if config.task == "classification":
        return Classifier(shape, words, 4), [ids, lengths, labels]
    if config.task == "translation":
        own = None if config.tokenizer.shared else words // 2
        return Translator(shape, words, own), [ids, lengths, ids, ids]
    if config.task == "images":
        images = torch.randint(0, 256, (batch, 3, 16, 20), dtype=torch.uint8)
        return ConvNet((3, 16, 20), 4, channels=shape.channels, hidden=shape.hidden), [images, labels]
    return Decoder(shape, words), [ids, ids]


@pytest.mark.parametrize("task", ["language_model", "classification", "translation", "images"])
@pytest.mark.parametrize("linear", ["torch", "onednn"])
@pytest.mark.parametrize("seed", range(12))
def test_a_forward_and_backward_hold_what_was_told(seed: int, linear: str, task: str) -> None:
    config, words = _drawn(seed)
    config = _of_task(replace(config, model=replace(config.model, linear=linear)), task, seed)
    told = _told(config, words)
    built, batch = _built(config, words)
    model = recompute(built, config.train)
    parameters = list(model.parameters())
    with Storages(ignoring=parameters) as alive:
        loss_sum, counted = model(*batch)
        (loss_sum / counted).backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert told.parameters == size_of(parameters)
    assert told.gradients == size_of(gradients)
    assert told.activations == pytest.approx(alive.most(besides=gradients), rel=0.15)
    assert told.tensors - told.optimizer == pytest.approx(size_of(parameters) + alive.most(), rel=0.15)


def test_longer_bundles_hold_more_and_images_need_their_size() -> None:
    config = replace(_config(Model()), task="classification")
    bundles = [replace(config, train=replace(config.train, slot_tokens=tokens)) for tokens in (1, 256, 512)]
    one_text, two, four = (_told(each).activations for each in bundles)
    assert one_text < two < four
    images = replace(config, task="images")
    assert estimate(images, _facts(300) | {"image": None}, workers=1, device="cpu") is None


def test_states_follow_the_parameters() -> None:
    shape = Model(layers=12, heads=12, width=768, context=1024, bias=True)
    need = _told(_config(shape, precision="bf16"), 50257)
    assert need.parameters == need.gradients == 4 * 124_439_808
    assert need.optimizer == 2 * need.parameters
    pure = _told(_config(shape, precision="pure_bf16"), 50257)
    assert (pure.parameters, pure.optimizer) == (need.parameters / 2, 3 * need.parameters)
    rounded = _told(_config(shape, precision="pure_bf16", stochastic_rounding=True), 50257)
    assert rounded.optimizer == need.optimizer


COUNTS = {
    "language_model": lambda config, words: count_parameters(config.model, words),
    "classification": lambda config, words: classifier_parameters(config.model, words, 4),
    "translation": lambda config, words: translator_parameters(
        config.model, words, None if config.tokenizer.shared else words // 2
    ),
    "images": lambda config, words: convnet_parameters(
        (3, 16, 20), 4, channels=config.model.channels, hidden=config.model.hidden
    ),
}


@pytest.mark.parametrize("task", COUNTS)
@pytest.mark.parametrize("seed", range(10))
def test_parameters_are_those_of_the_model(seed: int, task: str) -> None:
    config, words = _drawn(seed)
    config = _of_task(config, task, seed)
    network = network_of(config, _facts(words), slots=1, arithmetic=Arithmetic())
    assert network
    assert network.sizes == [p.numel() for p in _built(config, words)[0].parameters()]
    assert network.count == COUNTS[task](config, words)


@pytest.mark.parametrize("seed", range(4))
def test_parameters_are_those_of_gemma(seed: int) -> None:
    config, words = _of_gemma(seed)
    network = network_of(config, _facts(words), slots=1, arithmetic=Arithmetic())
    assert network
    assert network.sizes == [p.numel() for p in _built(config, words)[0].parameters()]
    assert network.count == count_parameters(config.model, words)


@pytest.mark.parametrize("seed", range(6))
def test_gemma_holds_what_was_told(seed: int) -> None:
    config, words = _of_gemma(seed)
    told = _told(config, words)
    built, batch = _built(config, words)
    model = recompute(built, config.train)
    parameters = list(model.parameters())
    with Storages(ignoring=parameters) as alive:
        loss_sum, counted = model(*batch)
        (loss_sum / counted).backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert told.activations == pytest.approx(alive.most(besides=gradients), rel=0.15)


def test_shards_are_shared_out() -> None:
    whole = _told(_config(Model(), slots=4), workers=4)
    spread = replace(_config(Model(), slots=4), scaling=Scaling(strategy="fsdp", workers=4))
    shards = _told(spread, workers=4)
    assert shards.parameters == whole.parameters / 4
    assert shards.optimizer == whole.optimizer / 4
    halves = _told(replace(spread, scaling=replace(spread.scaling, shard_workers=2)), workers=4)
    assert halves.parameters == whole.parameters / 2
    away = _told(replace(spread, scaling=replace(spread.scaling, offload=True)), workers=4, device="cuda")
    assert away.parameters == away.optimizer == 0
    assert away.host == 4 * shards.parameters


def test_activations_shrink_with_what_is_computed_again_and_with_kernels() -> None:
    shape = Model(layers=8)
    kept, some, few = (
        _told(_config(shape, activation_checkpointing=kind)).activations for kind in ("none", "selective", "full")
    )
    assert few < some < kept
    large = _config(shape, slot_size=64)
    on_cpu, on_gpu = _told(large, 50_000), _told(large, 50_000, device="cuda")
    half = _told(_config(shape, slot_size=64, precision="bf16"), 50_000, device="cuda")
    assert half.activations < on_gpu.activations < on_cpu.activations / 2
