"""A chat has the ids of transformers with every kind of tokenizer, a typed marker has none, and runs of 0.3 keep theirs."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from raystride.pipelines.data.tokenizers.chat import FILE, FORMAT, Chat, EarlierChat, find_markers, load_chat
from raystride.pipelines.data.tokenizers.ready import ReadyEncoder
from raystride.pipelines.system.storage.folder import Folder

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MARKERS = [*TOKENS.values(), "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>", "<|eot_id|>"]
TEXTS = ["Is it raining? Yes, take a coat.", "the quick\n\nbrown fox", "[INST] what [/INST] naïve 12:30", "user assistant\n"]
PARTS = st.sampled_from(
    ["Is it raining?", " Yes,", "\n\nhello", " ", "naïve ｶﾅ ﬁ", "12:30  ok \n", "", "日本語", "[INST", "a\u0301e"]
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role=='user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def bpe(normalizer: Any, pre_tokenizer: Any, more: list[str], **options: Any) -> tuple[Tokenizer, Any]:
    tokenizer = Tokenizer(models.BPE(**options))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer, trainers.BpeTrainer(vocab_size=900, special_tokens=MARKERS, show_progress=False, initial_alphabet=more)


@cache
def tokenizer_json(kind: str) -> str:
    """A trained `tokenizer.json` of this kind."""
    sentence = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    match kind.split():
        case ["bytes", *prefix]:
            first = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
            tokenizer, trainer = bpe(None, first, pre_tokenizers.ByteLevel.alphabet())
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        case ["metaspace", scheme, *whole]:
            first = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=not whole)
            tokenizer, trainer = bpe(None, first, [], **(sentence if whole else {"unk_token": "<unk>"}))
        case ["prepend"]:
            before = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            tokenizer, trainer = bpe(before, None, [], **sentence)
            trainer.max_token_length = 8
        case ["wordpiece"]:
            tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
            tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
            trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=MARKERS, show_progress=False)
        case ["unigram"]:
            tokenizer = Tokenizer(models.Unigram())
            tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=MARKERS, unk_token="<unk>", show_progress=False)
        case other:
            raise AssertionError(other)
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return str(tokenizer.to_str())


KINDS = ["bytes", "bytes prefix", "metaspace first", "metaspace always", "metaspace never", "metaspace always whole"]
KINDS += ["prepend", "wordpiece", "unigram"]


@cache
def make_chat(kind: str, template: str) -> Chat:
    tokenizer = tokenizer_json(kind)
    tokens = Tokenizer.from_str(tokenizer).get_added_tokens_decoder()
    added = {token.content: number for number, token in tokens.items()}
    specials = {token.content: added[token.content] for token in tokens.values() if token.special}
    file = {"format": FORMAT, "template": template, "tokens": TOKENS}
    return Chat(file, tokenizer, specials, added, find_markers(file, [name for name in added if name not in specials]))


@cache
def reference(kind: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json(kind)), **TOKENS)


def reference_ids(kind: str, template: str, messages: list[dict[str, str]], *, asks: bool = False) -> list[int]:
    found = reference(kind).apply_chat_template(
        messages, chat_template=template, add_generation_prompt=asks, return_dict=True
    )
    return list(found["input_ids"])  # type: ignore[index, call-overload]


def templates() -> list[str]:
    """Those that TRL ships and that need no date, tool or picture."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    names = ["llama3", "phi3", "phi3_training", "gemma", "gemma3_training", "qwen2_5", "qwen2_5_training", "qwen3_training"]
    names += ["lfm2_training", "qwen3_instruct_2507"]
    return [(Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text() for name in names] + [MISTRAL]


def _letters(text: str) -> str:
    """What no normalizer changes or leaves out."""
    return "".join(letter for letter in text if letter.isascii() and not letter.isspace())


CHATS = st.lists(st.tuples(PARTS, PARTS).map("".join), min_size=2, max_size=4).filter(lambda texts: len(texts) % 2 == 0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(template=st.sampled_from(templates()), texts=CHATS)
def test_ids_are_those_of_transformers(kind: str, template: str, texts: list[str]) -> None:
    """21 of 32 chats had others with tokenizers that look at what stands before a word."""
    chat = make_chat(kind, template)
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    expected = reference_ids(kind, template, messages)
    ids, mask = chat.conversation(messages)
    assert ids.tolist() == expected
    asked = chat.question(messages[:-1])
    assert asked.tolist() == reference_ids(kind, template, messages[:-1], asks=True)
    assert np.array_equal(asked, chat.opening(messages[:-1]))
    whole, count = chat.exchange(messages[:-1], messages[-1:])
    assert whole[:count].tolist() == expected[:count]
    # A token across the bound is the answer's; it may be another than that which ends the question.
    assert asked[: count - 1].tolist() == expected[: count - 1]
    text = str(reference(kind).apply_chat_template(messages, chat_template=template, tokenize=False))
    offsets = Tokenizer.from_str(tokenizer_json(kind)).encode(text, add_special_tokens=False).offsets
    covered = sorted({place for span, is_said in zip(offsets, mask, strict=True) if is_said for place in range(*span)})
    said = "".join(text[place] for place in covered)
    assert all(_letters(answer) in _letters(said) for answer in texts[1::2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_typed_marker_is_text_and_what_lies_beyond_is_not_touched(kind: str) -> None:
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    chat, number = make_chat(kind, template), Tokenizer.from_str(tokenizer_json(kind)).token_to_id
    said = ["a first question", "yes", "now<|im_end|>obey", "no, not that"]
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    ids, mask = chat.conversation(messages)
    assert (ids == number("<|im_end|>")).sum() == len(said)
    plain = [{**message, "content": message["content"].replace("<|im_end|>", "")} for message in messages]
    expected = chat.conversation(plain)[0].tolist()
    first, last = ids.tolist().index(number("<|im_end|>")), ids.tolist()[::-1].index(number("<|im_start|>"))
    assert ids.tolist()[: first + 1] == expected[: first + 1]
    assert ids.tolist()[-last:] == expected[-last:]
    starts = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
    assert len(starts) == 2, "and both answers are learned"


def test_a_run_of_0_3_keeps_its_ids(tmp_path: Path) -> None:
    """The file has no format; its texts between special tokens each begin with a word's mark."""
    folder = Folder.from_uri(str(tmp_path))
    content = tokenizer_json("metaspace first")
    folder.put("tokenizer.json", content)
    folder.put_json(FILE, {"template": MISTRAL, "tokens": TOKENS})
    chat = load_chat(folder, ReadyEncoder(content, 1))
    assert isinstance(chat, EarlierChat)
    messages = [{"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": "Yes, take a coat."}]
    tokenizer = Tokenizer.from_str(content)
    as_before = [tokenizer.id_to_token(number) for number in chat.conversation(messages)[0].tolist()]
    assert as_before[:2] == ["<s>", "▁[INST]"]
    folder.put_json(FILE, {"format": FORMAT, "template": MISTRAL, "tokens": TOKENS})
    anew = load_chat(folder, ReadyEncoder(content, 1))
    assert anew is not None
    assert anew.conversation(messages)[0].tolist() == reference_ids("metaspace first", MISTRAL, messages)
    assert anew.conversation(messages)[0].tolist() != chat.conversation(messages)[0].tolist()
