"""The tensors that a layout names without PyTorch are those that a decoder is written as, and a folder is held to them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from raystride.model.hugging_face import to_hugging_face
from raystride.model.hugging_face_config import complete_description
from raystride.model.hugging_face_layout import check_tensors, tensor_shapes
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig
from tests.model.test_hugging_face import FAMILIES, GPT2, LLAMA, PHI3, SHAPES, VOCABULARY

BIASED = replace(LLAMA, qkv_bias=True, out_bias=True)
ALL = {
    **SHAPES,
    **FAMILIES,
    "biased": BIASED,
    "plain_gpt2": replace(GPT2, bias=False, tie_embeddings=False),
    "fused": replace(LLAMA, family="phi3"),
}
Sizes = dict[str, tuple[int, ...]]


def _written(shape: ModelConfig) -> tuple[dict[str, Any], Sizes]:
    torch.manual_seed(0)
    description, tensors = to_hugging_face(Decoder(shape, VOCABULARY), end_id=0)
    return complete_description(description), {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("shape", ALL.values(), ids=ALL)
def test_names_and_shapes_are_those_of_the_written_folder(shape: ModelConfig) -> None:
    description, sizes = _written(shape)
    assert tensor_shapes(shape, VOCABULARY, description["model_type"]) == sizes
    check_tensors(shape, description, sizes, vocabulary_size=VOCABULARY, spare_ids=False)
    with pytest.raises(ValueError, match=r"ids and the run's tokenizer"):
        check_tensors(shape, description, sizes, vocabulary_size=VOCABULARY - 1, spare_ids=False)
    check_tensors(shape, description, sizes, vocabulary_size=VOCABULARY - 1, spare_ids=True)
    check_tensors(shape, description, sizes, vocabulary_size=None, spare_ids=False)


@pytest.mark.parametrize("shape", [GPT2, LLAMA, PHI3], ids=["gpt2", "llama", "phi3"])
def test_a_tensor_that_lacks_is_there_too_much_or_of_another_shape_is_named(shape: ModelConfig) -> None:
    description, sizes = _written(shape)
    for name, size in sizes.items():
        others: list[tuple[Sizes, str]] = [
            ({kept_name: sizes[kept_name] for kept_name in sizes if kept_name != name}, "no tensor ")
        ]
        if "wte" not in name and "embed_tokens" not in name and "wpe" not in name and "lm_head" not in name:
            others.append((sizes | {name: (*size[:-1], size[-1] + 1)}, "its tensor "))
        for changed, sentence in others:
            with pytest.raises(ValueError, match=sentence + name.replace(".", r"\.")):
                check_tensors(shape, description, changed, vocabulary_size=VOCABULARY, spare_ids=False)
    with pytest.raises(ValueError, match=r"has no place: .*\.more\.weight"):
        check_tensors(shape, description, sizes | {"more.weight": (1,)}, vocabulary_size=VOCABULARY, spare_ids=False)


def test_phi3_fuses_rows_and_says_so_without_partial_rotation() -> None:
    """Every published Phi-3 turns all of a head, which plain Llama does as well: only its folder tells."""
    description, sizes = _written(replace(LLAMA, family="phi3"))
    assert description["model_type"] == "phi3"
    inside = {name.removeprefix("model.layers.0.") for name in sizes if name.startswith("model.layers.0.")}
    assert {"self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"} <= inside
    assert not [name for name in inside if "q_proj" in name or "gate_proj" in name]
