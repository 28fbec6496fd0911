"""Tiny bases to fine-tune: folders in Hugging Face's layout, with random weights that no two seeds share.

folder = write_base(tmp_path / "base", SHAPES["llama"], seed=1)
config = tiny(text, model=replace(SHAPES["llama"], init_from=str(folder)), lora=Lora(rank=4))
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from raystride.model.hugging_face import to_hugging_face
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Model

BYTES = 257
"""Ids of the byte tokenizer."""
SHAPES = {
    "llama": Model(flavour="llama", layers=2, heads=4, kv_heads=2, width=32, context=16, feed_forward=48),
    "qwen2": Model(flavour="llama", layers=2, heads=4, kv_heads=2, width=32, context=16, qkv_bias=True, tied=True),
    "gpt2": Model(layers=2, heads=4, width=32, context=16, bias=True),
}


def write_base(folder: Path, shape: Model, seed: int = 1, vocabulary: int = BYTES) -> Path:
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
