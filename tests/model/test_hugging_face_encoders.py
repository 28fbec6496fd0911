"""An encoder with a classifier's head means the same here and to transformers, both ways, in batches of uneven lengths."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from raystride.model.classifier import Classifier
from raystride.model.hugging_face import encoder_from_hugging_face, encoder_to_hugging_face
from raystride.model.hugging_face_config import differing_settings, trained_context
from raystride.model.hugging_face_encoders import head_settings
from raystride.model.hugging_face_layout import check_tensors
from raystride.model.shape import UnfitError
from raystride.pipelines.config import ModelConfig
from tests.some import some

LABELS = ["calm", "cross", "glad"]
WORDS = 40
_SIZES = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "bert": {**_SIZES, "max_position_embeddings": 20},
    "roberta": {**_SIZES, "max_position_embeddings": 22, "layer_norm_eps": 1e-5},
    "distilbert": {"dim": 24, "hidden_dim": 36, "n_layers": 3, "n_heads": 2, "max_position_embeddings": 20},
    "modernbert": {**_SIZES, "max_position_embeddings": 20, "local_attention": 6, "pad_token_id": 0},
}


def theirs(kind: str, head: str = "SequenceClassification", **changes: Any) -> Any:
    """A model of transformers in which no two numbers are alike."""
    import transformers

    torch.manual_seed(3)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
    settings = {**KINDS[kind], "vocab_size": WORDS, **(ids if kind == "modernbert" else {}), **changes}
    named = {"id2label": dict(enumerate(LABELS)), "label2id": {label: n for n, label in enumerate(LABELS)}}
    config = transformers.AutoConfig.for_model(kind, **settings, **named)
    name = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert", "modernbert": "ModernBert"}[kind]
    model = getattr(transformers, f"{name}For{head}" if head else f"{name}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


def described(model: Any) -> dict[str, Any]:
    description: dict[str, Any] = model.config.to_dict()
    description["id2label"] = {str(number): label for number, label in description["id2label"].items()}  # as JSON has it
    return description


def shape_for(description: dict[str, Any]) -> ModelConfig:
    """The settings that a description asks for."""
    shape = ModelConfig()
    for _ in range(2):
        wanted = differing_settings(shape, description)
        shape = replace(shape, **{name: value for name, value in wanted.items() if name not in ("norm",)})
    family = description["model_type"]
    return replace(shape, family=family, context=trained_context(description), **head_settings(description))


def ours(kind: str, model: Any, labels: list[str] = LABELS) -> tuple[Classifier, list[str]]:
    description = described(model)
    torch.manual_seed(8)
    made = Classifier(shape_for(description), WORDS, len(labels)).eval()
    return made, encoder_from_hugging_face(made, description, model.state_dict(), labels=labels)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (4, 17) of uneven lengths, padded with what no text has; lengths (4)."""
    lengths = torch.tensor([17, 1, 9, 4])
    return torch.randint(4, WORDS, (4, 17), generator=torch.Generator().manual_seed(5)), lengths


def logits_of(model: Any, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    seen = torch.arange(ids.shape[1]) < lengths[:, None]
    padded = ids.where(seen, model.config.pad_token_id)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=padded, attention_mask=seen.long()).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_gets_the_logits_of_transformers(kind: str) -> None:
    model = theirs(kind)
    mine, begun = ours(kind, model)
    assert begun == []
    ids, lengths = texts()
    with torch.no_grad():
        found = mine.logits(ids, lengths)
    expected = logits_of(model, ids, lengths)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_back_is_loaded_by_transformers(kind: str) -> None:
    import transformers

    mine, _ = ours(kind, theirs(kind))
    padding = 1 if kind == "roberta" else 0
    description, tensors = encoder_to_hugging_face(mine, LABELS, padding)
    assert description["model_type"] == kind
    config = transformers.AutoConfig.for_model(**description)
    assert config.id2label == dict(enumerate(LABELS))
    loaded = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    assert type(loaded).__name__ == description["architectures"][0]
    loaded.load_state_dict(tensors)  # strictly
    ids, lengths = texts()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(loaded, ids, lengths), mine.logits(ids, lengths), rtol=0, atol=1e-5)
    again = Classifier(mine.shape, WORDS, len(LABELS))
    assert encoder_from_hugging_face(again, description, tensors, labels=LABELS) == []
    for one, other in some(zip(mine.parameters(), again.parameters(), strict=True)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_of_masked_words_lends_its_encoder(kind: str) -> None:
    model = theirs(kind, "MaskedLM")
    mine, found = ours(kind, model)
    # ModernBERT's head for words has a layer of the same form before it, which transformers takes as well.
    assert found == (["head"] if kind == "modernbert" else ["dense", "head"])
    with torch.no_grad():
        assert torch.equal(mine.embedding.weight, model.get_input_embeddings().weight)


def test_a_bare_encoder_has_a_pooler_and_no_root() -> None:
    model = theirs("bert", "")
    assert all(not name.startswith("bert.") for name in some(model.state_dict()))
    mine, begun = ours("bert", model)
    assert begun == ["head"]
    assert mine.dense is not None
    assert torch.equal(mine.dense.weight, model.pooler.dense.weight)


def test_old_folders_have_gamma_and_beta() -> None:
    model = theirs("bert")
    mine, _ = ours("bert", model)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in model.state_dict().items()
    } | {"bert.embeddings.position_ids": torch.arange(20)[None]}
    assert any(name.endswith("gamma") for name in tensors)
    again = Classifier(mine.shape, WORDS, len(LABELS))
    assert encoder_from_hugging_face(again, described(model), tensors, labels=LABELS) == []
    assert all(torch.equal(one, other) for one, other in some(zip(mine.parameters(), again.parameters(), strict=True)))


def test_a_head_goes_by_the_names_of_its_labels() -> None:
    model = theirs("bert")
    order = ["glad", "calm", "cross"]
    mine, begun = ours("bert", model, order)
    assert begun == []
    rows = [LABELS.index(label) for label in order]
    assert torch.equal(mine.head.weight, model.classifier.weight[rows])
    _, begun = ours("bert", model, ["calm", "cross", "sad"])
    assert begun == ["head"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_lacks_a_tensor_or_has_another_is_told(kind: str) -> None:
    model = theirs(kind)
    description, shape = described(model), shape_for(described(model))
    sizes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    rules: dict[str, Any] = {"vocabulary_size": WORDS, "spare_ids": False}
    check_tensors(shape, description, sizes, **rules)
    inside = sorted(name for name in sizes if ".1." in name)
    with pytest.raises(ValueError, match=inside[0]):
        check_tensors(shape, description, {name: size for name, size in sizes.items() if name != inside[0]}, **rules)
    with pytest.raises(ValueError, match=inside[0]):
        check_tensors(shape, description, sizes | {inside[0]: (7, 7)}, **rules)
    more = inside[0].replace(".1.", ".9.")
    with pytest.raises(ValueError, match=more):
        check_tensors(shape, description, sizes | {more: (7, 7)}, **rules)
    with pytest.raises(ValueError, match="ids"):
        check_tensors(shape, description, sizes, vocabulary_size=WORDS - 1, spare_ids=False)
    check_tensors(shape, description, sizes, vocabulary_size=WORDS - 1, spare_ids=True)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "relu"}, "hidden_act"),
        ("roberta", {"pad_token_id": 5}, "pad_token_id"),
        ("modernbert", {"attention_bias": True}, "attention_bias"),
        ("modernbert", {"classifier_activation": "silu"}, "classifier_activation"),
    ],
)
def test_what_no_setting_says_is_refused(kind: str, changes: dict[str, Any], named: str) -> None:
    description = described(theirs(kind))
    with pytest.raises(ValueError, match=named):
        differing_settings(ModelConfig(), description | changes)


def test_what_a_layout_cannot_say_is_refused_by_name() -> None:
    shape = shape_for(described(theirs("bert")))
    for name, value in (("pooling", "mean"), ("head_dense", "none"), ("norm", "pre")):
        with pytest.raises(UnfitError) as caught:
            encoder_to_hugging_face(Classifier(replace(shape, **{name: value}), WORDS, 3), LABELS)
        assert (caught.value.setting, caught.value.value) == (f"model.{name}", value)


def test_local_layers_look_both_ways_and_not_far() -> None:
    model = theirs("modernbert", num_hidden_layers=2)
    mine, _ = ours("modernbert", model)
    assert [block.attention.window for block in mine.blocks] == [0, 6]  # type: ignore[union-attr]
    local = mine.blocks[1].attention
    x = torch.randn(1, 9, 24)
    before = local(x)
    for moved in (0, 8):
        changed = x.clone()
        changed[0, moved] += 1
        seen = (local(changed) - before).abs().amax(-1)[0] > 1e-6
        assert seen.tolist() == [abs(place - moved) <= 3 for place in range(9)]
