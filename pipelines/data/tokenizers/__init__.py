"""Tokenizers: bytes, characters, a byte-level BPE trained on the data, or an existing `tokenizer.json`.

Every tokenizer is a folder of small files, saved beside the prepared data and copied beside an exported model:

    encoder = load_tokenizer(Folder.from_uri("runs/.prepared/6f1c.../tokenizer"))
    ids = encoder.encode("def main():")                       # uint32, (n,), without an end token
    encoder.decode(ids.tolist())                              # "def main():"
"""

from raystride.pipelines.data.tokenizers.loading import Tokenizers, load_tokenizer
from raystride.pipelines.data.tokenizers.training import train_tokenizer

__all__ = ["Tokenizers", "load_tokenizer", "train_tokenizer"]
