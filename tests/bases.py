"""Tiny bases to fine-tune: folders in Hugging Face's layout, with random weights that no two seeds share.

folder = write_base(tmp_path / "base", SHAPES["llama"], seed=1)
config = tiny(text, model=replace(SHAPES["llama"], init_from=str(folder)), lora=LoraConfig(rank=4))
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from raystride.model.classifier import Classifier
from raystride.model.hugging_face import encoder_to_hugging_face, to_hugging_face
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig

BYTES = 257
"""Ids of the byte tokenizer."""
SHAPES = {
    "llama": ModelConfig(architecture="llama", layers=2, heads=4, kv_heads=2, hidden_size=32, context=16, ffn_size=48),
    "qwen2": ModelConfig(
        architecture="llama", layers=2, heads=4, kv_heads=2, hidden_size=32, context=16, qkv_bias=True, tie_embeddings=True
    ),
    "gpt2": ModelConfig(layers=2, heads=4, hidden_size=32, context=16, bias=True),
}
_BERT = ModelConfig(
    architecture="bert", layers=2, heads=2, hidden_size=16, context=24, pooling="first", head_dense="tanh", norm_eps=1e-12
)
_MODERN = replace(_BERT, architecture="modernbert", head_dense="gelu", norm_eps=1e-5, rope_theta=1.6e5, window=6)
ENCODERS = {
    "bert": _BERT,
    "roberta": replace(_BERT, family="roberta", norm_eps=1e-5),
    "distilbert": replace(_BERT, head_dense="relu"),
    "modernbert": replace(_MODERN, window_layers=(1,), window_rope_theta=1e4, pooling="mean"),
}
WORDS = ("the", "market", "team", "won", "lost", "game", "stock", "price", "rose", "fell", "goal", "bank", "!", ",", "a")
"""What an encoder's tokenizer knows."""
SPECIALS = ("[PAD]", "[PAD2]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_base(folder: Path, shape: ModelConfig, seed: int = 1, vocabulary: int = BYTES) -> Path:
    """Writes a decoder of this shape, in which norms and biases differ from number to number as well; returns the folder."""
    torch.manual_seed(seed)
    model = Decoder(shape, vocabulary)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    description, tensors = to_hugging_face(model, end_id=vocabulary - 1)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(description))
    return folder


GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(
    folder: Path, added: dict[str, bool], config: dict[str, Any] | None = None, begin: str | None = None
) -> dict[str, int]:
    """Writes a tokenizer of bytes as people download one, with these added tokens, each special or not; its added ids.

    `config` is its `tokenizer_config.json`; its post-processor puts `begin` before a text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, special in added.items():
        tokenizer.add_tokens([AddedToken(name, special=special, normalized=False)])
    ids = {name: tokenizer.token_to_id(name) for name in added}
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, ids[begin])])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast"} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return ids


def write_words(folder: Path) -> int:
    """Writes a tokenizer of words, which puts [CLS] before a text and [SEP] behind it; returns how many ids it has."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = [each for letter in "abcdefghijklmnopqrstuvwxyz" for each in (letter, f"##{letter}")]
    ids = {word: number for number, word in enumerate(dict.fromkeys((*SPECIALS, *WORDS, *letters)))}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    around = [(name, ids[name]) for name in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*around)
    tokenizer.add_special_tokens([*SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return len(ids)


def write_encoder(folder: Path, kind: str, labels: Sequence[str] = (), seed: int = 1) -> Path:
    """Writes an encoder of this `model_type` and its tokenizer: one without a head, or a classifier of these labels."""
    words = write_words(folder)
    torch.manual_seed(seed)
    model = Classifier(ENCODERS[kind], words, max(1, len(labels)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    description, tensors = encoder_to_hugging_face(model, labels, 1 if kind == "roberta" else 0)
    if not labels:
        del description["id2label"], description["label2id"]
        own = ("classifier", "pre_classifier", "head.", "bert.pooler")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(own)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(description))
    return folder
