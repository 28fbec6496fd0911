"""An export gives the same results in transformers as the run does, and a run can start from transformers' own models.

All tests that import transformers are here, since that takes seconds a process.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from raystride.model.generate import generate
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, LoraConfig, ModelConfig, SampleConfig, TokenizerConfig
from raystride.pipelines.config.jobs import ExportConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.text_generation import write_text as write_text_of
from raystride.pipelines.data.tokenizers import train_tokenizer
from raystride.pipelines.evaluate.export import export_hugging_face
from raystride.pipelines.evaluate.load_run import LoadedModel, open_run
from raystride.pipelines.launch.finished import export_run
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.bases import CHATML, write_base, write_tokenizer
from tests.bases import GEMMA as GEMMAS_TEMPLATE
from tests.bases import SHAPES as SHAPES_OF_BASES
from tests.errors import refused
from tests.processes import make_job
from tests.ray_jobs.jobs import finish_job, start_script
from tests.tiny import tiny, write_text

CLOSE = 1e-5
TEXT = "def naïve(x):\n\treturn 'the 12 quick foxes — 平方 🙂'  # twice  \n\n"
GPT2 = ModelConfig(layers=2, heads=4, hidden_size=32, context=16)
LLAMA = ModelConfig(architecture="llama", layers=2, heads=4, kv_heads=2, hidden_size=32, context=16)
GEMMA = replace(LLAMA, norm="sandwich", gate="gelu", scaled_embedding=True, tie_embeddings=True, head_size=12)
MIXTRAL = replace(LLAMA, experts=5, expert_ffn_size=24)
SCALING = (8.0, 1.0, 4.0, 64.0)
"""Of four frequencies one is kept, one lies between and two are divided."""
SHAPES = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2 with biases": ("GPT2LMHeadModel", replace(GPT2, bias=True, ffn_size=48, tie_embeddings=False)),
    "gpt2 with biases of queries, by tanh": ("GPT2LMHeadModel", replace(GPT2, qkv_bias=True, gelu="tanh", norm_eps=1e-3)),
    "llama": ("LlamaForCausalLM", replace(LLAMA, kv_heads=0)),
    "llama with grouped heads": ("LlamaForCausalLM", replace(LLAMA, ffn_size=40, rope_theta=500_000.0)),
    "llama 3.2": ("LlamaForCausalLM", replace(LLAMA, tie_embeddings=True, rope_scaling=SCALING, norm_eps=1e-3)),
    "llama with larger heads": ("LlamaForCausalLM", replace(LLAMA, head_size=12)),
    "qwen2": ("Qwen2ForCausalLM", replace(LLAMA, qkv_bias=True, rope_theta=1e6)),
    "qwen2, tied, smaller heads": ("Qwen2ForCausalLM", replace(LLAMA, qkv_bias=True, tie_embeddings=True, head_size=6)),
    "qwen3": ("Qwen3ForCausalLM", replace(LLAMA, qk_norm=True, norm_eps=1e-2)),
    "llama with biases": ("LlamaForCausalLM", replace(LLAMA, qkv_bias=True, out_bias=True, rope_factor=4.0)),
    "qwen3 with some windows": (
        "Qwen3ForCausalLM",
        replace(LLAMA, qk_norm=True, qkv_bias=True, out_bias=True, window=3, window_layers=(0,)),
    ),
    "mistral": ("MistralForCausalLM", replace(LLAMA, window=3, head_size=6)),
    "smollm3": ("SmolLM3ForCausalLM", replace(LLAMA, nope_layers=(1,), tie_embeddings=True)),
    "phi3": ("Phi3ForCausalLM", replace(LLAMA, rotary_fraction=0.75, hidden_size=64, window=3)),
    "gemma2": (
        "Gemma2ForCausalLM",
        replace(GEMMA, softcap=5.0, logit_softcap=3.0, query_pre_attn_scalar=20, window=3, window_layers=(0,)),
    ),
    "gemma2 without caps": ("Gemma2ForCausalLM", GEMMA),
    "gemma3": (
        "Gemma3ForCausalLM",
        replace(GEMMA, qk_norm=True, window=3, window_layers=(0,), window_rope_theta=100.0, rope_factor=8.0),
    ),
    "gemma3 of one base": ("Gemma3ForCausalLM", replace(GEMMA, qk_norm=True, window=3, rope_theta=1e6)),
    "mixtral": ("MixtralForCausalLM", MIXTRAL),
    "qwen3 moe": ("Qwen3MoeForCausalLM", replace(MIXTRAL, qk_norm=True, router="softmax", head_size=12, ffn_size=40)),
    "olmoe": ("OlmoeForCausalLM", replace(MIXTRAL, qk_norm=True, qk_norm_joint=True, experts_per_token=3)),
    "qwen3, tied, larger heads": (
        "Qwen3ForCausalLM",
        replace(LLAMA, qk_norm=True, tie_embeddings=True, head_size=16, heads=6),
    ),
}
TOKENIZERS = {
    "bytes": TokenizerConfig(kind="bytes"),
    "characters": TokenizerConfig(kind="characters", vocabulary_size=40),
    "bpe": TokenizerConfig(kind="bpe", vocabulary_size=300),
}


def _open_run(shape: ModelConfig, folder: Folder, tokenizer: TokenizerConfig = TOKENIZERS["bytes"]) -> LoadedModel:
    """A model in which no two numbers are alike, norms and biases included, and a tokenizer of its own."""
    encoder = train_tokenizer(tokenizer, [TEXT[:40], "some other text 12"] * 50, folder / "tokenizer", log=lambda _: None)
    torch.manual_seed(0)
    model = Decoder(shape, encoder.vocabulary_size).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    config = Config(model=shape)
    return LoadedModel(config, build_task(config, None, {"tokenizer": encoder}), model, step=0, place=folder)


def _load_exported(folder: Folder) -> Any:
    """transformers' model of a folder; every weight has come from there."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def _max_logit_difference(ours: torch.nn.Module, theirs: Any) -> float:
    """Returns the largest difference of two models' logits, which are no constants."""
    assert isinstance(ours, Decoder)
    ids = torch.randint(0, ours.vocabulary_size, (2, ours.shape.context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert expected.std() > 0.01
        return float((ours.logits(ours.hidden(ids)) - expected).abs().max())


def _check_greedy_text(ours: torch.nn.Module, theirs: Any) -> None:
    """Prompts side by side, padded on the left, go on alike with either cache."""
    assert isinstance(ours, Decoder)
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    ids = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]])
    mask = torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9, pad_token_id=0)
    assert list(generate(ours, prompts, tokens=9, temperature=0)) == expected[:, 5:].t().tolist()


@pytest.mark.parametrize(("kind", "shape"), SHAPES.values(), ids=SHAPES.keys())
def test_transformers_gives_the_same_logits_and_text(kind: str, shape: ModelConfig, tmp_path: Path) -> None:
    opened = _open_run(shape, Folder(f"{tmp_path}/tokenizer"))
    theirs = _load_exported(export_hugging_face(opened, Folder(f"{tmp_path}/export")))
    assert type(theirs).__name__ == kind
    assert _max_logit_difference(opened.model, theirs) <= CLOSE
    _check_greedy_text(opened.model, theirs)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_transformers_gives_the_same_ids_and_text(tokenizer: TokenizerConfig, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    opened = _open_run(GPT2, Folder(f"{tmp_path}/tokenizer"), tokenizer)
    theirs = AutoTokenizer.from_pretrained(str(export_hugging_face(opened, Folder(f"{tmp_path}/export"))))
    ids = opened.encoder.encode(TEXT).tolist()
    assert theirs(TEXT)["input_ids"] == ids
    assert theirs.decode(ids, skip_special_tokens=True) == opened.encoder.decode(ids).replace("\ufffd", "")
    assert theirs.eos_token_id == opened.encoder.end_id
    assert len(theirs) == opened.encoder.vocabulary_size
    assert theirs.model_max_length == 16


@pytest.mark.parametrize("begin", ["auto", "none"])
def test_a_ready_tokenizer_keeps_its_beginning_where_training_saw_it(begin: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import processors
    from transformers import AutoTokenizer

    _open_run(GPT2, Folder(f"{tmp_path}/bpe"), TOKENIZERS["bpe"])
    ready = HuggingFaceTokenizer.from_file(f"{tmp_path}/bpe/tokenizer/tokenizer.json")
    ready.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    ready.enable_truncation(4)
    ready.save(f"{tmp_path}/ready.json")
    asked = TokenizerConfig(kind="file", file=f"{tmp_path}/ready.json", begin=begin)
    opened = _open_run(GPT2, Folder(f"{tmp_path}/tokenizer"), asked)
    theirs = AutoTokenizer.from_pretrained(str(export_hugging_face(opened, Folder(f"{tmp_path}/export"))))
    before = [0] if begin == "auto" else []
    assert theirs(TEXT)["input_ids"] == [*before, *opened.encoder.encode(TEXT).tolist()]


def test_a_chat_is_written_as_in_training(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    _open_run(GPT2, Folder(f"{tmp_path}/bpe"), TOKENIZERS["bpe"])
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    beside = Path(f"{tmp_path}/bpe/tokenizer")
    (beside / "chat_template.jinja").write_text(template)
    (beside / "tokenizer_config.json").write_text('{"bos_token": "[s]", "eos_token": "<|end|>"}')
    ready = TokenizerConfig(kind="file", file=f"{beside}/tokenizer.json")
    opened: Any = _open_run(GPT2, Folder(f"{tmp_path}/tokenizer"), ready)
    folder = export_hugging_face(opened, Folder(f"{tmp_path}/export"))
    theirs = AutoTokenizer.from_pretrained(str(folder))
    said = theirs.apply_chat_template([{"role": "user", "content": "def x"}], tokenize=False, add_generation_prompt=True)
    assert said == "[s][user]def x<|end|>[assistant]"
    assert opened.encoder.chat.question("def x").size
    assert theirs.eos_token_id == opened.encoder.end_id
    assert folder.read_json("generation_config.json")["eos_token_id"] == opened.encoder.end_id


def _always_writes(ids: list[int], vocabulary: int) -> Decoder:
    """A decoder that writes these ids, which are no two alike, one after another, round and round."""
    shape = ModelConfig(
        architecture="llama", layers=1, heads=4, hidden_size=4 * (-(-vocabulary // 4)), context=64, tie_embeddings=False
    )
    model = Decoder(shape, vocabulary).eval()
    state = model.state_dict()
    with torch.no_grad():
        for name, values in state.items():
            values.fill_(1.0) if "norm" in name else values.zero_()
        embedding, head = (next(state[n] for n in state if part in n) for part in ("embedding", "head"))
        embedding[:vocabulary, :vocabulary] = torch.eye(vocabulary)
        head[ids[0]] = 1.0
        for before, after in zip(ids, [*ids[1:], ids[0]], strict=True):
            head[:, before] = 0.0
            head[after, before] = 1.0
    return model


NAMES = ["<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "turn"), [(GEMMAS_TEMPLATE, "<end_of_turn>"), (CHATML, "<|im_end|>")], ids=["gemma", "qwen"]
)
def test_an_answer_ends_here_and_in_transformers_with_its_turn(template: str, turn: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "chat_template": template}
    ids = write_tokenizer(tmp_path / "base", dict.fromkeys(NAMES, True), tokens)
    asked = TokenizerConfig(kind="file", file=f"{tmp_path}/base/tokenizer.json")
    place = Folder(f"{tmp_path}/place")
    encoder = train_tokenizer(asked, [TEXT], place / "tokenizer", log=lambda _: None)
    said = "Yes, take a hot."
    written = [*dict.fromkeys(encoder.encode(said).tolist())]
    model = _always_writes([*written, ids[turn], *encoder.encode("~Z").tolist()], encoder.vocabulary_size)
    config = Config(task="completion", model=model.shape, tokenizer=asked)  # type: ignore[arg-type]
    base = {"eos": [ids["<eos>"], ids["<start_of_turn>"]], "bos": [ids["<bos>"]], "pad": [ids["<pad>"]]}
    task = build_task(config, {"base_ids": base}, {"tokenizer": encoder})
    opened = LoadedModel(config, task, model, step=0, place=place)
    ours = "".join(write_text_of(model, task, SampleConfig(prompt="Is it raining?", tokens=40, temperature=0.0)))
    assert ours == encoder.decode(written)

    folder = export_hugging_face(opened, Folder(f"{tmp_path}/export"))
    ends = [ids[turn], ids["<eos>"], ids["<start_of_turn>"]]
    for name in ("config.json", "generation_config.json"):
        described = folder.read_json(name)
        assert (described["eos_token_id"], described["bos_token_id"]) == (ends, ids["<bos>"])
    assert folder.read_json("generation_config.json")["pad_token_id"] == ids["<pad>"]
    tokenizer, theirs = AutoTokenizer.from_pretrained(str(folder)), _load_exported(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (turn, "<bos>", "<pad>")
    chat = [{"role": "user", "content": "Is it raining?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = theirs.generate(**prompt, do_sample=False, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
    assert output.tolist() == [*written, ids[turn]]
    assert GenerationConfig.from_pretrained(str(folder)).eos_token_id == ends


def test_the_ids_of_the_base_last_as_long_as_the_run(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", SHAPES_OF_BASES["llama"], vocabulary=256 + len(NAMES))
    ids = write_tokenizer(base, dict.fromkeys(NAMES, True), {"eos_token": "<eos>"})
    generation = {"eos_token_id": [ids["<eos>"], ids["<|im_end|>"], 10**6], "pad_token_id": ids["<pad>"]}
    (base / "generation_config.json").write_text(json.dumps(generation))
    config = tiny(
        write_text(tmp_path),
        model=replace(SHAPES_OF_BASES["llama"], init_from=str(base)),
        tokenizer=TokenizerConfig(kind="file", file=str(base / "tokenizer.json"), end_token="<eos>"),
    )
    training, _ = _training(config, tmp_path)
    training.run()
    Folder(f"{tmp_path}/run").put("config.yaml", to_yaml(config))
    (base / "generation_config.json").unlink()
    (base / "model.safetensors").unlink()
    longer = replace(config, train=replace(config.train, steps=9))
    resumed, _ = _training(longer, tmp_path)  # it goes on without that folder, and still knows
    resumed.run()
    opened = open_run(Folder(str(tmp_path)), "run", "last")
    assert opened.step == 9
    assert opened.task.end_ids == (ids["<eos>"], ids["<|im_end|>"])
    folder = export_hugging_face(opened, Folder(f"{tmp_path}/export"))
    described = folder.read_json("generation_config.json")
    assert described["eos_token_id"] == [ids["<eos>"], ids["<|im_end|>"]]
    assert described["pad_token_id"] == ids["<pad>"]
    second = replace(config, model=replace(config.model, init_from=f"{tmp_path}/run"))  # nor does the next run forget
    training, _ = _training(second, tmp_path, "second")
    training.run()
    Folder(f"{tmp_path}/second").put("config.yaml", to_yaml(second))
    assert open_run(Folder(str(tmp_path)), "second", "last").task.end_ids == opened.task.end_ids


def test_unsupported_settings_are_errors_of_their_setting(tmp_path: Path) -> None:
    opened = _open_run(replace(GPT2, kv_heads=2), Folder(f"{tmp_path}/tokenizer"))
    with refused("model.kv_heads", 2):
        export_hugging_face(opened, Folder(f"{tmp_path}/export"))
    assert not Folder(f"{tmp_path}/export").names()


SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
OTHERS = replace(LLAMA, ffn_size=48, norm_eps=1e-6)
GEMMA2 = replace(GEMMA, ffn_size=48, norm_eps=1e-6, window=3, window_layers=(0,))
PARTLY = {"partial_rotary_factor": 0.75}
SOURCES: dict[str, tuple[str, dict[str, Any], ModelConfig]] = {
    "gpt2 by tanh": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, replace(GPT2, bias=True, gelu="tanh")),
    "llama": ("Llama", GROUPED | {"rms_norm_eps": 1e-3}, replace(OTHERS, norm_eps=1e-3)),
    "llama 3.2": (
        "Llama",
        GROUPED | {"tie_word_embeddings": True, "head_dim": 12, "rope_parameters": LLAMA3},
        replace(OTHERS, tie_embeddings=True, head_size=12, rope_theta=5e5, rope_scaling=SCALING),
    ),
    "tied llama as one that is not": (
        "Llama",
        GROUPED | {"tie_word_embeddings": True},
        replace(OTHERS, tie_embeddings=False),
    ),
    "qwen2": ("Qwen2", GROUPED, replace(OTHERS, qkv_bias=True)),
    "tied qwen2": ("Qwen2", GROUPED | {"tie_word_embeddings": True}, replace(OTHERS, qkv_bias=True, tie_embeddings=True)),
    "qwen3": ("Qwen3", SIZES | {"num_key_value_heads": 4, "head_dim": 8}, replace(OTHERS, qk_norm=True, kv_heads=0)),
    "tied qwen3": (
        "Qwen3",
        GROUPED | {"tie_word_embeddings": True, "head_dim": 16},
        replace(OTHERS, qk_norm=True, tie_embeddings=True, head_size=16),
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
    "smollm2": ("Llama", GROUPED | {"tie_word_embeddings": True}, replace(OTHERS, tie_embeddings=True)),
    "smollm3": (
        "SmolLM3",
        GROUPED | {"no_rope_layer_interval": 2, "pad_token_id": None},
        replace(OTHERS, tie_embeddings=True, nope_layers=(1,), rope_theta=2e6),
    ),
    "phi3": ("Phi3", GROUPED | {"sliding_window": 4, "pad_token_id": None}, replace(OTHERS, norm_eps=1e-5, window=4)),
    "mixtral": (
        "Mixtral",
        GROUPED | {"num_local_experts": 4},
        replace(MIXTRAL, experts=4, expert_ffn_size=48, rope_theta=1e6),
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12},
        replace(MIXTRAL, ffn_size=48, norm_eps=1e-6, experts=4, qk_norm=True, router="softmax", head_size=12),
    ),
    "olmoe": (
        "Olmoe",
        GROUPED | {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True, "pad_token_id": None},
        replace(MIXTRAL, experts=4, experts_per_token=3, expert_ffn_size=48, qk_norm=True, qk_norm_joint=True),
    ),
    "phi3, of whose heads some is turned": (
        "Phi3",
        GROUPED | {"pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | PARTLY},
        replace(OTHERS, norm_eps=1e-5, rotary_fraction=0.75),
    ),
    "gemma2": (
        "Gemma2",
        GROUPED
        | {"head_dim": 12, "sliding_window": 3, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        replace(GEMMA2, softcap=5.0, logit_softcap=3.0, query_pre_attn_scalar=20),
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
    assert _max_logit_difference(training.model.eval(), source) <= CLOSE
    _check_greedy_text(training.model, source)
    assert said == [f"weights from {tmp_path}/source"]
    # What it has learned stays: the source is read for a fresh run alone, and may be gone when this one goes on.
    training.run()
    shutil.rmtree(tmp_path / "source")
    resumed, said = _training(config, tmp_path)
    assert "resumed from step 6" in said
    assert all(torch.equal(a, b) for a, b in zip(training.model.parameters(), resumed.model.parameters(), strict=True))
    assert _max_logit_difference(resumed.model.eval(), source) > 0.01


@pytest.mark.parametrize("by_number", [True, False])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3 moe", "olmoe"])
def test_experts_are_read_by_number_or_all_in_one(kind: str, by_number: bool, tmp_path: Path) -> None:
    source = _source(kind, tmp_path / "source")
    source.save_pretrained(tmp_path / "other", save_original_format=by_number)
    with safe_open(tmp_path / "other/model.safetensors", "pt") as stored:
        assert any(".experts.0." in name for name in [*stored.keys()]) == by_number
    config = tiny(write_text(tmp_path), model=replace(SOURCES[kind][2], init_from=str(tmp_path / "other")))
    training, _ = _training(config, tmp_path)
    assert _max_logit_difference(training.model.eval(), source) <= CLOSE


def test_a_context_beyond_the_positions_of_the_base_is_told(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", SHAPES_OF_BASES["llama"])
    for context, told in ((16, False), (24, True)):
        model = replace(SHAPES_OF_BASES["llama"], init_from=str(base), context=context)
        _, said = _training(tiny(write_text(tmp_path), model=model), tmp_path, f"run{context}")
        lines = [line for line in said if "positions" in line]
        assert bool(lines) == told
        assert all("context is 24" in line and "the 16 positions" in line for line in lines)


def test_a_run_is_exported_by_its_job_and_another_one_starts_there(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path), model=LLAMA, tokenizer=TokenizerConfig(kind="characters"))
    training, _ = _training(config, tmp_path, "first")
    training.run()
    Folder(f"{tmp_path}/first").put("config.yaml", to_yaml(config))
    flags = ("--run", "first", "--storage", str(tmp_path), "--checkpoint", "last", "--to", "hugging_face")
    outcome = finish_job(start_script("export", *flags))
    assert outcome.code == 0, outcome.err
    folder = Folder(f"{tmp_path}/first/export/hugging_face")
    assert outcome.lines[-3].split() == ["results", str(folder)]
    assert [line.split()[0] for line in outcome.lines[-2:]] == ["mlflow", "next"]
    assert _max_logit_difference(training.model.eval(), _load_exported(folder)) <= CLOSE
    second, _ = _training(replace(config, model=replace(LLAMA, init_from=str(folder))), tmp_path, "second")
    assert all(torch.equal(a, b) for a, b in zip(training.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("base_precision", ["fp32", "bf16"])
def test_a_run_of_adapters_is_exported_as_one_or_merged(base_precision: Any, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", SHAPES_OF_BASES["llama"])
    lora = LoraConfig(rank=4, base_precision=base_precision)
    config = tiny(write_text(tmp_path), model=replace(SHAPES_OF_BASES["llama"], init_from=str(base)), lora=lora)
    training, _ = _training(config, tmp_path)
    training.run()
    Folder(f"{tmp_path}/run").put("config.yaml", to_yaml(config))
    asked = ExportConfig(run="run", storage=str(tmp_path), checkpoint="last")
    adapter, _ = export_run(asked)
    assert adapter == Folder(f"{tmp_path}/run/export/adapter")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(adapter.names())
    assert adapter.read_json("adapter_config.json")["base_model_name_or_path"] == str(base)
    merged, _ = export_run(replace(asked, merge=True))
    assert merged == Folder(f"{tmp_path}/run/export/hugging_face")
    assert _max_logit_difference(training.model.eval(), _load_exported(merged)) <= CLOSE
    plain = replace(config, model=SHAPES_OF_BASES["llama"], lora=LoraConfig())
    Folder(f"{tmp_path}/run").put("config.yaml", to_yaml(plain))
    with refused("merge", True, names=["lora.rank is 0"]):
        export_run(replace(asked, merge=True))


def test_an_export_has_the_names_of_its_base_or_is_refused(tmp_path: Path) -> None:
    """As runs of earlier versions on a Phi-3, whose adapters have the names of Llama, which they were taken for."""
    shape = SHAPES_OF_BASES["llama"]
    base = write_base(tmp_path / "base", replace(shape, family="phi3", context=64))
    config = tiny(write_text(tmp_path), model=replace(shape, init_from=str(base)), lora=LoraConfig(rank=4))
    training, _ = _training(config, tmp_path)
    training.run()
    Folder(f"{tmp_path}/run").put("config.yaml", to_yaml(config))
    asked = ExportConfig(run="run", storage=str(tmp_path), checkpoint="last")
    with refused("model.init_from", str(base), names=["mlp.gate_proj.weight", "--merge true"]):
        export_run(asked)
    merged, _ = export_run(replace(asked, merge=True))
    written = merged.read_json("config.json")
    assert (written["model_type"], written["max_position_embeddings"]) == ("phi3", 64)
    assert _max_logit_difference(training.model.eval(), _load_exported(merged)) <= CLOSE
