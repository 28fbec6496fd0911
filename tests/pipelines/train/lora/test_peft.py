"""Adapters go to PEFT and come from there without a missing key, give the same logits, and learn the same in 20 steps.

All that imports PEFT stands here, since that takes seconds a process.
"""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from raystride.model.hugging_face import hf_names
from raystride.model.lora import attach_adapters, find_targets, merge_adapters
from raystride.model.transformer import Decoder
from raystride.model.translator import Translator
from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.lora.peft import CONFIG, WEIGHTS, read_adapter, write_adapter
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.bases import ENCODERS, SHAPES, write_base, write_encoder
from tests.errors import refused
from tests.model.test_hugging_face import FAMILIES
from tests.processes import make_job
from tests.some import some
from tests.tiny import tiny, write_text

CLOSE = 1e-5
PLAIN = LoraConfig(rank=4, alpha=8)
KINDS = {
    "llama": ("llama", PLAIN),
    "llama, by names": ("llama", LoraConfig(rank=3, targets=("q_proj", "mlp.down_proj"))),
    "qwen2, dora and rslora": ("qwen2", LoraConfig(rank=4, dora=True, rslora=True)),
    "qwen2, pissa": ("qwen2", LoraConfig(rank=4, init="pissa")),
    "gpt2": ("gpt2", LoraConfig(rank=4, alpha=64)),
    "gpt2, one of two of a name": ("gpt2", LoraConfig(rank=4, alpha=64, targets=("attn.c_proj",), init="gaussian")),
    "gpt2, olora": ("gpt2", LoraConfig(rank=2, init="olora", rslora=True)),
    "phi3, dora and rslora": ("phi3", LoraConfig(rank=4, dora=True, rslora=True)),
    "mixtral": ("mixtral", LoraConfig(rank=4)),
    "qwen3 moe, dora": ("qwen3_moe", LoraConfig(rank=2, dora=True, targets=("q_proj", "o_proj"))),
    "olmoe": ("olmoe", LoraConfig(rank=2, init="pissa")),
    "published phi3": ("published phi3", LoraConfig(rank=4)),
    "phi3, pissa, of two halves one": ("phi3", LoraConfig(rank=3, init="pissa", targets=("gate", "0.feed_forward.up"))),
}


PUBLISHED = {"published phi3": replace(SHAPES["llama"], family="phi3")}
"""As every Phi-3 that there is, it turns all of each head, which plain Llama does, too."""


class _Losses:
    """A watcher that keeps each step's loss."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if "train_loss" in measured:
            self.found.append(measured["train_loss"])

    def on_step(self, step: int) -> None: ...
    def on_pause(self, seconds: float) -> None: ...
    def on_checkpoint(self, step: int, path: str) -> None: ...


def _config(folder: Path, kind: str, steps: int = 6, **changes: Any) -> Config:
    """A training on a base, of a constant learning rate."""
    name, lora = KINDS[kind]
    shape = replace((SHAPES | FAMILIES | PUBLISHED)[name], context=16)
    base = write_base(folder / "base", shape)
    sections: dict[str, Any] = {
        "model": replace(shape, init_from=str(base)),
        "lora": lora,
        "optimizer": OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0),
        "train": TrainConfig(steps=steps, slots=4, slot_size=2, log_every=1),
        "validation": ValidationConfig(every=0),
        "checkpoint": CheckpointConfig(every=0),
    }
    return tiny(write_text(folder), **sections | changes)


def _training(config: Config, folder: Path, run: str = "run", watchers: tuple[Any, ...] = ()) -> Training:
    return build_training(make_job(config, folder, run), WorkerInfo(), list(watchers), lambda: False, lambda _: None)


def _peft(base: Path, adapter: Path, *, training: bool = False) -> Any:
    """Loads the adapter with PEFT. Fails at a warning of missing or unexpected keys."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter), is_trainable=training)
    assert not [str(each.message) for each in said if "key" in str(each.message) or "fan_in" in str(each.message)]
    return model


def _ids() -> torch.Tensor:
    return torch.randint(0, 257, (3, 16), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_was_trained_here_and_what_is_merged_says_the_same(kind: str, tmp_path: Path) -> None:
    config = _config(tmp_path, kind)
    training = _training(config, tmp_path)
    before = _logits(training)
    training.run()
    write_adapter(training.model, config.lora, Folder(str(tmp_path / "adapter")), base=str(config.model.init_from))
    here = _logits(training)
    assert (here - before).abs().max() > 0.01, "it has learned something"
    assert _adapted_names(tmp_path / "adapter") <= _names(tmp_path / "base" / "model.safetensors")
    theirs = _peft(tmp_path / "base", tmp_path / "adapter").eval()
    with torch.no_grad():
        assert (theirs(_ids()).logits - here).abs().max() < CLOSE
        merge_adapters(training.model)
        assert (_logits(training) - here).abs().max() < CLOSE


def _names(file: Path) -> set[str]:
    from safetensors.torch import load_file

    return set(load_file(file))


def _adapted_names(adapter: Path) -> set[str]:
    """The base's tensors that an adapter changes. PEFT passes over those that the base does not have."""
    names = {name.removeprefix("base_model.model.") for name in _names(adapter / WEIGHTS)}
    return {f"{name.partition('.lora_')[0]}.weight" for name in names}


@torch.no_grad()
def _logits(training: Training) -> torch.Tensor:
    model: Any = training.model
    was, _ = model.training, model.eval()
    logits: torch.Tensor = model.logits(model.hidden(_ids()))
    model.train(was)
    return logits


@pytest.mark.parametrize(("kind", "steps"), [("llama", 20), ("qwen2, dora and rslora", 8), ("gpt2", 8)])
def test_each_step_has_the_loss_that_peft_has(kind: str, steps: int, tmp_path: Path) -> None:
    config, losses = _config(tmp_path, kind, steps), _Losses()
    training = _training(config, tmp_path, watchers=(losses,))
    write_adapter(training.model, config.lora, Folder(str(tmp_path / "adapter")), base=str(config.model.init_from))
    theirs = _peft(tmp_path / "base", tmp_path / "adapter", training=True).train()
    _same_course(training, config, theirs, losses, steps)


def test_pissa_has_the_losses_that_pefts_own_has(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config, losses = _config(tmp_path, "qwen2, pissa", 8), _Losses()
    training = _training(config, tmp_path, watchers=(losses,))
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    described = LoraConfig(r=4, lora_alpha=config.lora.alpha, init_lora_weights="pissa", target_modules=names)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), described).train()
    _same_course(training, config, theirs, losses, 8)


def _same_course(training: Training, config: Config, theirs: Any, losses: _Losses, steps: int) -> None:
    """Trains both on the same batches by the same rule."""
    rule, trained = config.optimizer, [each for each in theirs.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() >= 2], "weight_decay": rule.weight_decay},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rule.learning_rate, betas=rule.betas, eps=rule.eps)
    found = []
    for number in range(steps):
        total, counted = torch.zeros(()), 0
        optimizer.zero_grad()
        for batch in training.loader.read_step(number).micro_batches:
            (ids,) = training.loader.samples.task.unpack(batch.inputs)
            logits = theirs(ids).logits
            total = total + F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
            counted += batch.targets.numel()
        (total / counted).backward()
        torch.nn.utils.clip_grad_norm_(trained, config.train.clip_norm)
        optimizer.step()
        found.append(float(total.detach()) / counted)
    training.run()
    assert len(losses.found) == steps
    assert found[0] - found[-1] > 0.01, "it learns"
    for ours, other in zip(losses.found, found, strict=True):
        assert abs(ours - other) < CLOSE


@pytest.mark.parametrize("kind", ["llama", "published phi3"])
def test_an_adapter_that_peft_made_is_where_a_run_starts(kind: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = _config(tmp_path, kind)
    described = LoraConfig(r=4, lora_alpha=config.lora.alpha, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(3)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), described).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    config = replace(config, lora=replace(config.lora, init_from=str(tmp_path / "theirs")))
    training = _training(config, tmp_path)
    with torch.no_grad():
        assert (theirs(_ids()).logits - _logits(training)).abs().max() < CLOSE


@pytest.mark.parametrize("kind", ["published phi3", "phi3, dora and rslora"])
def test_an_adapter_that_was_written_here_is_where_a_run_starts(kind: str, tmp_path: Path) -> None:
    """Also one in which gate and up, each with an adapter, are one layer of twice the rank."""
    config = _config(tmp_path, kind)
    training = _training(config, tmp_path)
    training.run()
    write_adapter(training.model, config.lora, Folder(str(tmp_path / "adapter")), base=str(config.model.init_from))
    again = _training(replace(config, lora=replace(config.lora, init_from=str(tmp_path / "adapter"))), tmp_path, "again")
    assert torch.equal(_logits(again), _logits(training))


def _change_description(folder: Path, **changes: Any) -> None:
    description = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("changes", "wanted", "names"),
    [
        ({"r": 8, "use_dora": True}, {"lora.rank": 8, "lora.dora": True}, ("--lora.rank 8 --lora.dora true",)),
        ({"target_modules": ["q_proj"]}, {"lora.targets": '["q_proj"]'}, ("""--lora.targets '["q_proj"]'""",)),
        ({"peft_type": "IA3"}, None, ("'IA3'", "LORA")),
        ({"bias": "all"}, None, ("biases",)),
        ({"rank_pattern": {"q_proj": 2}}, None, ("rank_pattern",)),
        (
            {"init_lora_weights": "pissa_niter_4"},
            None,
            ("init_lora_weights is 'pissa_niter_4'", "path_initial_model_for_weight_conversion"),
        ),
        (
            {"target_modules": r"model\.layers\.1\..*\.(q|v)_proj"},
            {"lora.targets": '["1.self_attn.q_proj", "1.self_attn.v_proj"]'},
            ("""--lora.targets '["1.self_attn.q_proj", "1.self_att""",),
        ),
        ({"exclude_modules": ["q_proj"]}, ANY, ("""--lora.targets '["down_proj", """, '"v_proj"]')),
        ({"target_modules": "(q_proj"}, None, ("target_modules", "regular expression")),
        ({"target_modules": "query"}, None, ("target_modules", "no layer")),
    ],
)
def test_an_adapter_of_other_settings_is_refused_by_their_names(
    changes: dict[str, Any], wanted: Any, names: tuple[str, ...], tmp_path: Path
) -> None:
    config = _config(tmp_path, "llama")
    adapter = tmp_path / "adapter"
    write_adapter(_training(config, tmp_path).model, config.lora, Folder(str(adapter)), base="")
    _change_description(adapter, **changes)
    again = replace(config, lora=replace(config.lora, init_from=str(adapter)))
    with refused("lora.init_from", str(adapter), names=names) as raised:
        _training(again, tmp_path, "again")
    assert raised.value.allowed == wanted


def test_experts_are_refused_as_targets_by_their_names(tmp_path: Path) -> None:
    """PEFT adapts them by `target_parameters`; here their matrices have no adapters."""
    config = _config(tmp_path, "mixtral")
    with refused("lora.targets", "w1", names=["q_proj", "experts"]):
        _training(replace(config, lora=replace(config.lora, targets=("w1",))), tmp_path)
    adapter = tmp_path / "adapter"
    write_adapter(_training(config, tmp_path, "plain").model, config.lora, Folder(str(adapter)), base="")
    _change_description(adapter, target_parameters=["mlp.experts.gate_up_proj"])
    with refused("lora.init_from", str(adapter), names=["target_parameters", "mlp.experts.gate_up_proj"]):
        _training(replace(config, lora=replace(config.lora, init_from=str(adapter))), tmp_path, "again")


def test_targets_by_a_regular_expression_are_those_that_peft_means(tmp_path: Path) -> None:
    config = _config(tmp_path, "llama", lora=replace(PLAIN, targets=("1.self_attn.q_proj", "1.self_attn.v_proj")))
    adapter = tmp_path / "adapter"
    write_adapter(_training(config, tmp_path).model, config.lora, Folder(str(adapter)), base="")
    _change_description(adapter, target_modules=r".*\.1\..*\.(q|v)_proj", init_lora_weights="eva")
    assert _training(replace(config, lora=replace(config.lora, init_from=str(adapter))), tmp_path, "again")
    assert {name for name, each in _peft(tmp_path / "base", adapter).named_modules() if name.endswith("lora_A")} == {
        f"base_model.model.model.layers.1.self_attn.{name}.lora_A" for name in ("q_proj", "v_proj")
    }


def test_only_settings_that_are_understood_may_differ_from_pefts_defaults(tmp_path: Path) -> None:
    """An activated LoRA was read as a plain one, with logits off by as much as they are large."""
    from peft import LoraConfig as PeftConfig

    config = _config(tmp_path, "llama")
    training, adapter = _training(config, tmp_path), tmp_path / "adapter"
    write_adapter(training.model, config.lora, Folder(str(adapter)), base="")
    defaults = json.loads(json.dumps(PeftConfig().to_dict(), default=str))
    written = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(defaults | written))
    read_adapter(training.model, config.lora, Folder(str(adapter)))
    unknown = {"alora_invocation_tokens": [5, 6], "use_qalora": True, "kasa_config": {"a": 1}, "of_a_version_to_come": "on"}
    for key, value in unknown.items():
        (adapter / CONFIG).write_text(json.dumps(defaults | written | {key: value}))
        with refused("lora.init_from", str(adapter), names=[key]):
            read_adapter(training.model, config.lora, Folder(str(adapter)))


def test_keys_that_peft_would_pass_over_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = _config(tmp_path, "llama")
    adapter = tmp_path / "adapter"
    write_adapter(_training(config, tmp_path).model, config.lora, Folder(str(adapter)), base="")
    tensors = load_file(adapter / WEIGHTS)
    save_file({name.removeprefix("base_model.model."): each for name, each in tensors.items()}, adapter / WEIGHTS)
    again = replace(config, lora=replace(config.lora, init_from=str(adapter)))
    with refused("lora.init_from", str(adapter), names=["no tensor base_model.model.model.layers.0"]):
        _training(again, tmp_path, "again")


def test_a_network_without_a_layout_is_named(tmp_path: Path) -> None:
    model = Translator(ModelConfig(architecture="llama", layers=1, heads=2, hidden_size=8, context=8), 40)
    attach_adapters(model, LoraConfig(rank=2, targets=("cross_attention.v",)), hf_names(model))
    with refused("lora.targets", "decoder.0.cross_attention.v", names=["decoder.0.cross_attention.v", "PEFT", "Translator"]):
        write_adapter(model, LoraConfig(rank=2), Folder(str(tmp_path)), base="")


@pytest.mark.parametrize("kind", ["phi3", "gemma2"])
def test_families_get_adapters_by_the_names_of_their_layouts(kind: str) -> None:
    model = Decoder(FAMILIES[kind], 50)
    named = {each.hf_name.rpartition(".")[2] for each in find_targets(model, hf_names(model))}
    expected = {"phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}}
    assert named == expected.get(kind, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})


def _classification(folder: Path, kind: str, lora: LoraConfig, **changes: Any) -> Config:
    """A training of a classifier on an encoder without a head."""
    base = write_encoder(folder / "base", kind)
    rows = [{"text": f"the {word} rose", "label": word} for word in ("market", "team") for _ in range(20)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sections: dict[str, Any] = {
        "task": "classification",
        "data": DataConfig(source=str(folder / "rows.jsonl"), kind="json", validation_fraction=0.1),
        "model": replace(ENCODERS[kind], init_from=str(base)),
        "tokenizer": TokenizerConfig(kind="file", file=str(base / "tokenizer.json")),
        "lora": lora,
        "optimizer": OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0),
        "train": TrainConfig(steps=4, slots=2, slot_size=4, log_every=1),
        "validation": ValidationConfig(every=0),
        "checkpoint": CheckpointConfig(every=0),
    }
    return tiny(folder / "rows.jsonl", **sections | changes)


OF_ENCODERS = {
    "bert": ("bert", PLAIN, {"output.dense", "intermediate.dense", "query", "key", "value"}),
    "roberta, by names": ("roberta", LoraConfig(rank=3, targets=("query", "value")), {"query", "value"}),
    "distilbert, dora": ("distilbert", LoraConfig(rank=4, dora=True, rslora=True), None),
    "modernbert": ("modernbert", PLAIN, {"Wqkv", "Wi", "Wo"}),
}


@pytest.mark.parametrize("kind", OF_ENCODERS)
def test_peft_loads_adapters_and_the_head_of_a_classifier(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    name, lora, targets = OF_ENCODERS[kind]
    config = _classification(tmp_path, name, lora)
    training = _training(config, tmp_path)
    model: Any = training.model
    frozen = {key: each.detach().clone() for key, each in model.named_parameters() if not each.requires_grad}
    head = model.head.weight.detach().clone()
    training.run()
    assert all(torch.equal(each, frozen[key]) for key, each in some(model.named_parameters()) if key in frozen)
    assert not torch.equal(model.head.weight, head)
    adapter = tmp_path / "adapter"
    write_adapter(model, lora, Folder(str(adapter)), base=str(config.model.init_from))
    description = json.loads((adapter / CONFIG).read_text())
    assert description["task_type"] == "SEQ_CLS"
    assert targets is None or {*description["target_modules"]} == targets
    base = AutoModelForSequenceClassification.from_pretrained(str(config.model.init_from), num_labels=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        theirs = PeftModel.from_pretrained(base, str(adapter)).eval()
    assert not [str(each.message) for each in said if "key" in str(each.message)]
    assert type(theirs).__name__ == "PeftModelForSequenceClassification"
    ids, lengths = torch.randint(6, 20, (3, 9), generator=torch.Generator().manual_seed(5)), torch.tensor([9, 2, 5])
    seen = torch.arange(9) < lengths[:, None]
    with torch.no_grad():
        mine = model.eval().logits(ids, lengths)
        expected = theirs(input_ids=ids.where(seen, base.config.pad_token_id), attention_mask=seen.long()).logits
        torch.testing.assert_close(mine, expected, rtol=0, atol=CLOSE)
        assert mine.std(0).min() > 1e-3
    # What PEFT itself saves has the same names, and is read here.
    theirs.save_pretrained(str(tmp_path / "again"))
    assert _names(tmp_path / "again" / WEIGHTS) == _names(adapter / WEIGHTS)
    for place in (adapter, tmp_path / "again"):
        other: Any = _training(replace(config, lora=replace(lora, init_from=str(place))), tmp_path, place.name).model.eval()
        with torch.no_grad():
            torch.testing.assert_close(other.logits(ids, lengths), mine, rtol=0, atol=CLOSE)
            merge_adapters(other)
            torch.testing.assert_close(other.logits(ids, lengths), mine, rtol=0, atol=CLOSE)


def test_a_head_of_other_labels_is_refused(tmp_path: Path) -> None:
    config = _classification(tmp_path, "bert", PLAIN)
    training = _training(config, tmp_path)
    write_adapter(training.model, PLAIN, Folder(str(tmp_path / "adapter")), base="x")
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    tensors["base_model.model.classifier.weight"] = torch.zeros(3, 16)
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    with refused("lora.init_from", str(tmp_path / "adapter"), names=["classifier.weight", "labels"]):
        _training(replace(config, lora=replace(PLAIN, init_from=str(tmp_path / "adapter"))), tmp_path, "other")
