"""Every tokenizer decodes its ids to the text, is the same after saving, and takes linear time in a text's length."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from raystride.pipelines.config import TokenizerConfig
from raystride.pipelines.data.tokenizers import load_tokenizer, train_tokenizer
from raystride.pipelines.data.tokenizers.byte_pairs import BytePairEncoder
from raystride.pipelines.data.tokenizers.ready import ReadyEncoder
from raystride.pipelines.data.tokenizers.training import read_end_id, read_new_end
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import CHATML
from tests.bases import write_tokenizer as write_base_tokenizer
from tests.errors import refused

TEXTS = ["def main():\n    return 'naïve' + \"日本語\"\n\n\n", "import os  # it's 2026\n" * 40, "x = [1, 22, 333]\r\n\t"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def encoders(folder: Path) -> dict:
    """One encoder of each kind that needs no file."""
    kinds = ("bytes", "characters", "bpe")
    return {
        kind: train_tokenizer(
            TokenizerConfig(kind=kind, vocabulary_size=400), iter(TEXTS), Folder(str(folder / kind)), print
        )
        for kind in kinds
    }


def write_tokenizer(path: Path, *, end: str | None = "</s>", normalizer: object = None, words: bool = False) -> Path:
    """Writes a small `tokenizer.json`: byte-level BPE with GPT-2's pattern, or whole words."""
    if words:
        tokenizer = HuggingFace(models.WordLevel(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", *([end] if end else [])], show_progress=False)
    else:
        tokenizer = HuggingFace(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[end] if end else [],
            show_progress=False,
        )
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(path))
    return path


@given(text=ANY_TEXT)
def test_bytes_and_bpe_roundtrip_any_text(encoders: dict, text: str) -> None:
    for kind in ("bytes", "bpe"):
        encoder = encoders[kind]
        ids = encoder.encode(text)
        assert ids.dtype == np.uint32
        assert encoder.decode(ids.tolist()) == text
        assert encoder.end_id not in ids


@given(text=ANY_TEXT)
def test_characters_roundtrip_with_unknown_ones_replaced(encoders: dict, text: str) -> None:
    encoder = encoders["characters"]
    known = set(encoder.characters)
    expected = "".join(c if c in known else "\ufffd" for c in text)
    assert encoder.decode(encoder.encode(text).tolist()) == expected


@given(text=ANY_TEXT)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tiktoken_gives_the_ids_of_tokenizers(encoders: dict, folder: Path, text: str) -> None:
    reference = HuggingFace.from_file(str(folder / "bpe/tokenizer.json"))
    reference.encode_special_tokens = True
    assert encoders["bpe"].encode(text).tolist() == reference.encode(text, add_special_tokens=False).ids


def test_loading_gives_the_same_encoder(encoders: dict, folder: Path) -> None:
    for kind, encoder in encoders.items():
        again = load_tokenizer(Folder(str(folder / kind)))
        assert type(again) is type(encoder)
        assert (again.vocabulary_size, again.end_id) == (encoder.vocabulary_size, encoder.end_id)
        assert np.array_equal(again.encode(TEXTS[0]), encoder.encode(TEXTS[0]))


def test_sizes_and_ends(encoders: dict) -> None:
    assert (encoders["bytes"].vocabulary_size, encoders["bytes"].end_id) == (257, 256)
    assert encoders["bpe"].vocabulary_size <= 400
    characters = encoders["characters"]
    assert (characters.end_id, characters.unknown_id) == (0, 1)
    assert characters.vocabulary_size == len(set("".join(TEXTS))) + 2


def test_characters_are_ordered_by_frequency_then_code_point_and_cut(tmp_path: Path) -> None:
    settings = TokenizerConfig(kind="characters", vocabulary_size=5)
    encoder = train_tokenizer(settings, iter(["ccbbad", "ccx"]), Folder(str(tmp_path)), print)
    assert encoder.vocabulary_size == 5
    assert encoder.encode("cbadx").tolist() == [2, 3, 4, 1, 1]


def test_special_tokens_in_the_data_are_ordinary_text(encoders: dict, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json")
    ready = train_tokenizer(TokenizerConfig(kind="file", file=str(file)), iter(TEXTS), Folder(str(tmp_path / "t")), print)
    words = ReadyEncoder(file.read_text(), ready.end_id)
    for encoder, end in [(encoders["bpe"], "<|end|>"), (ready, "</s>"), (words, "</s>")]:
        ids = encoder.encode(f"a{end}b").tolist()
        assert encoder.end_id not in ids
        assert encoder.decode([*ids, encoder.end_id]) == f"a{end}b"


@pytest.mark.parametrize("unit", ["a", " ", "\n", "é", "QUJD+/", "^"])
def test_text_without_a_break_is_encoded_in_linear_time(encoders: dict, unit: str) -> None:
    text = unit * (3_000_000 // len(unit))
    for encoder in encoders.values():
        ids = encoder.encode(text)  # quadratic time would be hours
        if encoder is not encoders["characters"]:
            assert encoder.decode(ids.tolist()) == text


def test_a_million_letters_train_a_bpe(tmp_path: Path) -> None:
    settings = TokenizerConfig(vocabulary_size=300)
    encoder = train_tokenizer(settings, iter(["ab" * 500_000]), Folder(str(tmp_path)), print)
    assert encoder.decode(encoder.encode("abab").tolist()) == "abab"


def test_training_twice_gives_the_same_files(encoders: dict, folder: Path, tmp_path: Path) -> None:
    train_tokenizer(TokenizerConfig(vocabulary_size=400), iter(TEXTS), Folder(str(tmp_path)), print)
    for name in ("tokenizer.json", "tokenizer_kind.json"):
        assert (tmp_path / name).read_bytes() == (folder / "bpe" / name).read_bytes()


def test_a_ready_file_is_encoded_by_tiktoken_if_ids_are_equal(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json")
    encoder = train_tokenizer(TokenizerConfig(kind="file", file=str(file)), iter(TEXTS), Folder(str(tmp_path / "t")), print)
    assert isinstance(encoder, BytePairEncoder)
    reference = HuggingFace.from_file(str(file))
    for text in TEXTS:
        assert encoder.encode(text).tolist() == reference.encode(text, add_special_tokens=False).ids
    assert encoder.end_id == reference.token_to_id("</s>")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [({"normalizer": normalizers.Lowercase()}, "normalizes"), ({"words": True}, "no byte-level BPE")],
)
def test_other_ready_files_are_encoded_by_tokenizers_and_it_says_why(tmp_path: Path, shape: dict, reason: str) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json", **shape)
    lines: list[str] = []
    settings = TokenizerConfig(kind="file", file=str(file))
    encoder = train_tokenizer(settings, iter(TEXTS), Folder(str(tmp_path / "t")), lines.append)
    assert isinstance(encoder, ReadyEncoder)
    assert len(lines) == 1
    assert reason in lines[0]


def test_other_merges_are_noticed_on_the_data(tmp_path: Path) -> None:
    """A vocabulary numbered in another order than its merges looks ordinary until its ids are compared."""
    file = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(file.read_text())
    letters = {token: i for token, i in content["model"]["vocab"].items() if i <= 256}
    content["model"] |= {"vocab": letters | {"ab": 257, "bc": 258}, "merges": [["b", "c"], ["a", "b"]]}
    file.write_text(json.dumps(content))
    lines: list[str] = []
    settings = TokenizerConfig(kind="file", file=str(file))
    encoder = train_tokenizer(settings, iter(["abc"]), Folder(str(tmp_path / "t")), lines.append)
    assert isinstance(encoder, ReadyEncoder)
    assert "other ids" in lines[0]


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("tokenizer_config.json", {"eos_token": "<e>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<e>", "special": True}}),
        ("generation_config.json", {"eos_token_id": ["id", 0]}),
        ("config.json", {"eos_token_id": "id"}),
    ],
)
def test_the_end_token_is_that_of_the_folder_whatever_its_name(name: str, stated: dict[str, Any], tmp_path: Path) -> None:
    for place, others in ((tmp_path / "alone", []), (tmp_path / "others", ["</s>"])):
        number = write_base_tokenizer(place, dict.fromkeys(["<e>", *others], True))["<e>"]
        text = json.dumps(stated).replace('"id"', str(number))
        (place / name).write_text(text)
        settings = TokenizerConfig(kind="file", file=str(place / "tokenizer.json"))
        encoder = train_tokenizer(settings, ["a text"], Folder.from_uri(str(place / "out")), lambda _: None)
        assert encoder.end_id == number
        assert read_end_id(settings) == number
        assert read_new_end(settings) == "<e>", "0.3 would have refused the folder, or ended with another token"
    (tmp_path / "others" / name).write_text("{}")
    assert read_new_end(settings) is None


def test_end_tokens(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "none.json", end=None)
    target = Folder(str(tmp_path / "t"))
    with refused("tokenizer.end_token", None):
        train_tokenizer(TokenizerConfig(kind="file", file=str(file)), iter(TEXTS), target, print)
    with refused("tokenizer.end_token", "<stop>"):
        train_tokenizer(TokenizerConfig(kind="file", file=str(file), end_token="<stop>"), iter(TEXTS), target, print)
    encoder = train_tokenizer(TokenizerConfig(kind="file", file=str(file), end_token="!"), iter(TEXTS), target, print)
    assert encoder.end_id == HuggingFace.from_file(str(file)).token_to_id("!")


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    for name in ("broken.json", "missing.json"):
        with refused("tokenizer.file"):
            train_tokenizer(
                TokenizerConfig(kind="file", file=str(tmp_path / name)), iter([]), Folder(str(tmp_path / "t")), print
            )


def test_importing_is_cheap() -> None:
    import subprocess
    import sys

    heavy = {"tokenizers", "tiktoken", "pyarrow", "ray"}
    code = f"import sys, raystride.pipelines.data.tokenizers; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_bpe_in_lower_case_is_blind_to_case_also_when_loaded_again(tmp_path: Path) -> None:
    chosen = TokenizerConfig(kind="bpe", vocabulary_size=400, lowercase=True)
    train_tokenizer(chosen, iter(TEXTS), Folder(str(tmp_path)), lambda _: None)
    encoder = load_tokenizer(Folder(str(tmp_path)))
    assert encoder.encode("Def MAIN Ä").tolist() == encoder.encode("def main ä").tolist()
    assert encoder.decode(encoder.encode("Def MAIN").tolist()) == "def main"
    with refused("tokenizer.lowercase", True, names=["`bytes`"]):
        TokenizerConfig(kind="bytes", lowercase=True)


@pytest.mark.parametrize("template", [None, CHATML], ids=["no template", "chatml"])
def test_texts_with_markers_are_logged_and_read_as_set(template: str | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    names = {"<|im_start|>": True, "<|im_end|>": True, "</s>": True}
    ids = write_base_tokenizer(tmp_path, names, {"chat_template": template, "eos_token": "</s>"})
    written = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    said: list[str] = []
    asked = TokenizerConfig(kind="file", file=str(tmp_path / "tokenizer.json"), chat_template="auto")
    encoder = train_tokenizer(asked, [written, "plain"] * 2, Folder(str(tmp_path / "text")), said.append)
    (line,) = [line for line in said if "markers" in line]
    assert line.startswith("tokenizer: 2 of the first 4 texts hold special tokens, such as <|im_start|>")
    assert not set(ids.values()) & set(encoder.encode(written).tolist())
    said.clear()
    train_tokenizer(asked, ["plain", "a </i> b"], Folder(str(tmp_path / "plain")), said.append)
    assert not any("markers" in line for line in said)

    special = replace(asked, markers="special")
    encoder = train_tokenizer(special, [written], Folder(str(tmp_path / "special")), said.append)
    assert isinstance(load_tokenizer(Folder(str(tmp_path / "special"))), ReadyEncoder)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert encoder.encode(written).tolist() == theirs(written)["input_ids"]
    assert not any("markers" in line for line in said)
    if encoder.chat:  # whatever texts are, in a chat nobody forges a turn
        assert encoder.chat.question("hi<|im_end|>").tolist().count(ids["<|im_end|>"]) == 1
    with refused("tokenizer.markers", "special"):
        TokenizerConfig(kind="bpe", markers="special")
