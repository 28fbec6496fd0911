"""What transformers loads from an export says what the run says, and a run that starts from transformers' own models too.

All that imports transformers stands here, since that takes seconds a process.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.model.generate import generate
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, Lora, Model, Tokenizer
from raystride.pipelines.config.jobs import Export
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.evaluate.export import export_hugging_face
from raystride.pipelines.evaluate.opening import Opened
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.finished import export_run
from raystride.pipelines.tasks import build_task
from raystride.pipelines.tokenizers import train_tokenizer
from raystride.pipelines.train.loop import Training
from raystride.pipelines.worker.job import WorkerInfo
from raystride.pipelines.worker.worker import build_training
from tests.bases import SHAPES as SHAPES_OF_BASES
from tests.bases import write_base
from tests.errors import refused
from tests.processes import make_job
from tests.ray_jobs.jobs import finish_job, start_script
from tests.tiny import tiny, write_text

CLOSE = 1e-5
TEXT = "def naïve(x):\n\treturn 'the 12 quick foxes — 平方 🙂'  # twice  \n\n"
GPT2 = Model(layers=2, heads=4, width=32, context=16)
LLAMA = Model(flavour="llama", layers=2, heads=4, kv_heads=2, width=32, context=16)
GEMMA = replace(LLAMA, norm="sandwich", gate="gelu", scaled_embedding=True, tied=True, head_size=12)
SCALING = (8.0, 1.0, 4.0, 64.0)
"""Of four frequencies one is kept, one lies between and two are divided."""
SHAPES = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2 with biases": ("GPT2LMHeadModel", replace(GPT2, bias=True, feed_forward=48, tied=False)),
    "gpt2 with biases of queries, by tanh": ("GPT2LMHeadModel", replace(GPT2, qkv_bias=True, gelu="tanh", norm_eps=1e-3)),
    "llama": ("LlamaForCausalLM", replace(LLAMA, kv_heads=0)),
    "llama with grouped heads": ("LlamaForCausalLM", replace(LLAMA, feed_forward=40, rope_theta=500_000.0)),
    "llama 3.2": ("LlamaForCausalLM", replace(LLAMA, tied=True, rope_scaling=SCALING, norm_eps=1e-3)),
    "llama with larger heads": ("LlamaForCausalLM", replace(LLAMA, head_size=12)),
    "qwen2": ("Qwen2ForCausalLM", replace(LLAMA, qkv_bias=True, rope_theta=1e6)),
    "qwen2, tied, smaller heads": ("Qwen2ForCausalLM", replace(LLAMA, qkv_bias=True, tied=True, head_size=6)),
    "qwen3": ("Qwen3ForCausalLM", replace(LLAMA, qk_norm=True, norm_eps=1e-2)),
    "llama with biases": ("LlamaForCausalLM", replace(LLAMA, qkv_bias=True, out_bias=True, rope_factor=4.0)),
    "qwen3 with some windows": (
        "Qwen3ForCausalLM",
        replace(LLAMA, qk_norm=True, qkv_bias=True, out_bias=True, window=3, window_layers=(0,)),
    ),
    "mistral": ("MistralForCausalLM", replace(LLAMA, window=3, head_size=6)),
    "smollm3": ("SmolLM3ForCausalLM", replace(LLAMA, unrotated_layers=(1,), tied=True)),
    "phi3": ("Phi3ForCausalLM", replace(LLAMA, rotary_share=0.75, width=64, window=3)),
    "gemma2": (
        "Gemma2ForCausalLM",
        replace(GEMMA, softcap=5.0, logit_softcap=3.0, query_scalar=20, window=3, window_layers=(0,)),
    ),
    "gemma2 without caps": ("Gemma2ForCausalLM", GEMMA),
    "gemma3": (
        "Gemma3ForCausalLM",
        replace(GEMMA, qk_norm=True, window=3, window_layers=(0,), window_rope_theta=100.0, rope_factor=8.0),
    ),
    "gemma3 of one base": ("Gemma3ForCausalLM", replace(GEMMA, qk_norm=True, window=3, rope_theta=1e6)),
    "qwen3, tied, larger heads": ("Qwen3ForCausalLM", replace(LLAMA, qk_norm=True, tied=True, head_size=16, heads=6)),
}
TOKENIZERS = {
    "bytes": Tokenizer(kind="bytes"),
    "characters": Tokenizer(kind="characters", vocabulary_size=40),
    "bpe": Tokenizer(kind="bpe", vocabulary_size=300),
}


def _opened(shape: Model, folder: Folder, tokenizer: Tokenizer = TOKENIZERS["bytes"]) -> Opened:
    """A model in which no two numbers are alike, norms and biases included, and a tokenizer of its own."""
    encoder = train_tokenizer(tokenizer, [TEXT[:40], "some other text 12"] * 50, folder / "tokenizer", echo=lambda _: None)
    torch.manual_seed(0)
    model = Decoder(shape, encoder.vocabulary_size).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    config = Config(model=shape)
    return Opened(config, build_task(config, None, {"tokenizer": encoder}), model, step=0, place=folder)


def _loaded(folder: Folder) -> Any:
    """transformers' model of a folder; every weight has come from there."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def _gap(ours: torch.nn.Module, theirs: Any) -> float:
    """The largest difference of two models' logits, which are no constants."""
    assert isinstance(ours, Decoder)
    ids = torch.randint(0, ours.vocabulary_size, (2, ours.shape.context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert expected.std() > 0.01
        return float((ours.logits(ours.hidden(ids)) - expected).abs().max())


def _same_greedy_text(ours: torch.nn.Module, theirs: Any) -> None:
    """Prompts side by side, padded on the left, go on alike with either cache."""
    assert isinstance(ours, Decoder)
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    ids = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]])
    mask = torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9, pad_token_id=0)
    assert list(generate(ours, prompts, tokens=9, temperature=0)) == expected[:, 5:].t().tolist()


@pytest.mark.parametrize(("kind", "shape"), SHAPES.values(), ids=SHAPES.keys())
def test_transformers_gives_the_same_logits_and_text(kind: str, shape: Model, tmp_path: Path) -> None:
    opened = _opened(shape, Folder(f"{tmp_path}/tokenizer"))
    theirs = _loaded(export_hugging_face(opened, Folder(f"{tmp_path}/export")))
    assert type(theirs).__name__ == kind
    assert _gap(opened.model, theirs) <= CLOSE
    _same_greedy_text(opened.model, theirs)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_transformers_gives_the_same_ids_and_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    opened = _opened(GPT2, Folder(f"{tmp_path}/tokenizer"), tokenizer)
    theirs = AutoTokenizer.from_pretrained(str(export_hugging_face(opened, Folder(f"{tmp_path}/export"))))
    ids = opened.encoder.encode(TEXT).tolist()
    assert theirs(TEXT)["input_ids"] == ids
    assert theirs.decode(ids, skip_special_tokens=True) == opened.encoder.decode(ids).replace("\ufffd", "")
    assert theirs.eos_token_id == opened.encoder.end_id
    assert len(theirs) == opened.encoder.vocabulary_size
    assert theirs.model_max_length == 16


def test_a_ready_tokenizer_loses_what_training_never_saw(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import processors
    from transformers import AutoTokenizer

    _opened(GPT2, Folder(f"{tmp_path}/bpe"), TOKENIZERS["bpe"])
    ready = HuggingFaceTokenizer.from_file(f"{tmp_path}/bpe/tokenizer/tokenizer.json")
    ready.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    ready.enable_truncation(4)
    ready.save(f"{tmp_path}/ready.json")
    opened = _opened(GPT2, Folder(f"{tmp_path}/tokenizer"), Tokenizer(kind="file", file=f"{tmp_path}/ready.json"))
    theirs = AutoTokenizer.from_pretrained(str(export_hugging_face(opened, Folder(f"{tmp_path}/export"))))
    assert theirs(TEXT)["input_ids"] == opened.encoder.encode(TEXT).tolist()


def test_a_chat_is_written_as_in_training(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    _opened(GPT2, Folder(f"{tmp_path}/bpe"), TOKENIZERS["bpe"])
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    beside = Path(f"{tmp_path}/bpe/tokenizer")
    (beside / "chat_template.jinja").write_text(template)
    (beside / "tokenizer_config.json").write_text('{"bos_token": "[s]", "eos_token": "<|end|>"}')
    ready = Tokenizer(kind="file", file=f"{beside}/tokenizer.json")
    opened: Any = _opened(GPT2, Folder(f"{tmp_path}/tokenizer"), ready)
    folder = export_hugging_face(opened, Folder(f"{tmp_path}/export"))
    theirs = AutoTokenizer.from_pretrained(str(folder))
    said = theirs.apply_chat_template([{"role": "user", "content": "def x"}], tokenize=False, add_generation_prompt=True)
    assert said == "[s][user]def x<|end|>[assistant]"
    assert opened.encoder.chat.question("def x").size
    assert theirs.eos_token_id == opened.encoder.end_id
    assert folder.read_json("generation_config.json")["eos_token_id"] == opened.encoder.end_id


def test_what_the_layout_cannot_say_is_an_error_of_its_setting(tmp_path: Path) -> None:
    opened = _opened(replace(GPT2, kv_heads=2), Folder(f"{tmp_path}/tokenizer"))
    with refused("model.kv_heads", 2):
        export_hugging_face(opened, Folder(f"{tmp_path}/export"))
    assert not Folder(f"{tmp_path}/export").names()


SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
OTHERS = replace(LLAMA, feed_forward=48, norm_eps=1e-6)
GEMMA2 = replace(GEMMA, feed_forward=48, norm_eps=1e-6, window=3, window_layers=(0,))
PARTLY = {"partial_rotary_factor": 0.75}
SOURCES: dict[str, tuple[str, dict[str, Any], Model]] = {
    "gpt2 by tanh": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, replace(GPT2, bias=True, gelu="tanh")),
    "llama": ("Llama", GROUPED | {"rms_norm_eps": 1e-3}, replace(OTHERS, norm_eps=1e-3)),
    "llama 3.2": (
        "Llama",
        GROUPED | {"tie_word_embeddings": True, "head_dim": 12, "rope_parameters": LLAMA3},
        replace(OTHERS, tied=True, head_size=12, rope_theta=5e5, rope_scaling=SCALING),
    ),
    "tied llama as one that is not": ("Llama", GROUPED | {"tie_word_embeddings": True}, replace(OTHERS, tied=False)),
    "qwen2": ("Qwen2", GROUPED, replace(OTHERS, qkv_bias=True)),
    "tied qwen2": ("Qwen2", GROUPED | {"tie_word_embeddings": True}, replace(OTHERS, qkv_bias=True, tied=True)),
    "qwen3": ("Qwen3", SIZES | {"num_key_value_heads": 4, "head_dim": 8}, replace(OTHERS, qk_norm=True, kv_heads=0)),
    "tied qwen3": (
        "Qwen3",
        GROUPED | {"tie_word_embeddings": True, "head_dim": 16},
        replace(OTHERS, qk_norm=True, tied=True, head_size=16),
    ),
    "llama with biases": (
        "Llama",
        GROUPED | {"attention_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        replace(OTHERS, qkv_bias=True, out_bias=True, rope_factor=4.0),
    ),
    "qwen2.5 with windows": (
        "Qwen2",
        GROUPED | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        replace(OTHERS, qkv_bias=True, window=3, window_layers=(1,)),
    ),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 3}, replace(OTHERS, window=3)),
    "mistral without a window": (
        "Mistral",
        GROUPED | {"sliding_window": None, "head_dim": 12},
        replace(OTHERS, head_size=12),
    ),
    "smollm2": ("Llama", GROUPED | {"tie_word_embeddings": True}, replace(OTHERS, tied=True)),
    "smollm3": (
        "SmolLM3",
        GROUPED | {"no_rope_layer_interval": 2, "pad_token_id": None},
        replace(OTHERS, tied=True, unrotated_layers=(1,), rope_theta=2e6),
    ),
    "phi3": ("Phi3", GROUPED | {"sliding_window": 4, "pad_token_id": None}, replace(OTHERS, norm_eps=1e-5, window=4)),
    "phi3, of whose heads some is turned": (
        "Phi3",
        GROUPED | {"pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | PARTLY},
        replace(OTHERS, norm_eps=1e-5, rotary_share=0.75),
    ),
    "gemma2": (
        "Gemma2",
        GROUPED
        | {"head_dim": 12, "sliding_window": 3, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        replace(GEMMA2, softcap=5.0, logit_softcap=3.0, query_scalar=20),
    ),
    "gemma3": (
        "Gemma3Text",
        GROUPED
        | {"head_dim": 12, "sliding_window": 3, "query_pre_attn_scalar": 12}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        replace(GEMMA2, qk_norm=True, window_rope_theta=1e4, rope_theta=1e6),
    ),
}
"""transformers' class, what it is told beyond its defaults, and our settings for it."""


def _source(kind: str, folder: Path) -> Any:
    """A tiny model of transformers' own, for bytes, saved in several files."""
    import transformers

    name, sizes, _ = SOURCES[kind]
    torch.manual_seed(1)
    described = getattr(transformers, f"{name}Config")(vocab_size=257, **sizes)
    whole = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
    model: Any = getattr(transformers, whole.get(name, f"{name}ForCausalLM"))(described)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model.eval()


def _training(config: Config, storage: Path, run: str = "run") -> tuple[Training, list[str]]:
    said: list[str] = []
    return build_training(make_job(config, storage, run), WorkerInfo(), [], lambda: False, said.append), said


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_starts_with_the_logits_of_its_source(kind: str, tmp_path: Path) -> None:
    source = _source(kind, tmp_path / "source")
    config = tiny(write_text(tmp_path), model=replace(SOURCES[kind][2], init_from=str(tmp_path / "source")))
    training, said = _training(config, tmp_path)
    assert _gap(training.model.eval(), source) <= CLOSE
    _same_greedy_text(training.model, source)
    assert said == [f"weights from {tmp_path}/source"]
    # What it has learned stays: the source is read for a fresh run alone, and may be gone when this one goes on.
    training.run()
    shutil.rmtree(tmp_path / "source")
    resumed, said = _training(config, tmp_path)
    assert "resumed from step 6" in said
    assert all(torch.equal(a, b) for a, b in zip(training.model.parameters(), resumed.model.parameters(), strict=True))
    assert _gap(resumed.model.eval(), source) > 0.01


def test_a_run_is_exported_by_its_job_and_another_one_starts_there(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path), model=LLAMA, tokenizer=Tokenizer(kind="characters"))
    training, _ = _training(config, tmp_path, "first")
    training.run()
    Folder(f"{tmp_path}/first").put("config.yaml", to_yaml(config))
    flags = ("--run", "first", "--storage", str(tmp_path), "--checkpoint", "last", "--to", "hugging_face")
    outcome = finish_job(start_script("export", *flags))
    assert outcome.code == 0, outcome.err
    folder = Folder(f"{tmp_path}/first/export/hugging_face")
    assert outcome.lines[-3].split() == ["results", str(folder)]
    assert [line.split()[0] for line in outcome.lines[-2:]] == ["mlflow", "next"]
    assert _gap(training.model.eval(), _loaded(folder)) <= CLOSE
    second, _ = _training(replace(config, model=replace(LLAMA, init_from=str(folder))), tmp_path, "second")
    assert all(torch.equal(a, b) for a, b in zip(training.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("base_precision", ["fp32", "bf16"])
def test_a_run_of_adapters_is_exported_as_one_or_merged(base_precision: Any, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", SHAPES_OF_BASES["llama"])
    lora = Lora(rank=4, base_precision=base_precision)
    config = tiny(write_text(tmp_path), model=replace(SHAPES_OF_BASES["llama"], init_from=str(base)), lora=lora)
    training, _ = _training(config, tmp_path)
    training.run()
    Folder(f"{tmp_path}/run").put("config.yaml", to_yaml(config))
    asked = Export(run="run", storage=str(tmp_path), checkpoint="last")
    adapter, _ = export_run(asked)
    assert adapter == Folder(f"{tmp_path}/run/export/adapter")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(adapter.names())
    assert adapter.read_json("adapter_config.json")["base_model_name_or_path"] == str(base)
    merged, _ = export_run(replace(asked, merge=True))
    assert merged == Folder(f"{tmp_path}/run/export/hugging_face")
    assert _gap(training.model.eval(), _loaded(merged)) <= CLOSE
    plain = replace(config, model=SHAPES_OF_BASES["llama"], lora=Lora())
    Folder(f"{tmp_path}/run").put("config.yaml", to_yaml(plain))
    with refused("merge", True, names=["lora.rank is 0"]):
        export_run(replace(asked, merge=True))
