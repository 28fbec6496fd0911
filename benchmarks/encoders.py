"""A classifier that begins with an encoder beside ours from scratch, on the same labelled snippets of the standard library.

The encoder is made here, since no real weights come with any package: a small BERT of transformers, trained for some minutes
to fill in masked words of other packages' source, which has no label and none of the snippets. Then each way is trained by
`raystride train` on the same labelled snippets, for the same steps, with each learning rate, and scored on the same others:

    encoder        `--model.init_from` that BERT
    same network   that BERT's shape and tokenizer, from random weights
    preset         configs/classify_packages.yaml

    python -m benchmarks.encoders                              # some minutes; --labelled, --steps, --seconds
"""

import argparse
import itertools
import json
import random
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import runs
from benchmarks.pairs import command_line, machine, machine_line, report
from raystride.pipelines.data.sources.embedded import packages

CONTEXT, WORDS = 128, 4096
SHAPE = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
RATES = (5e-4, 2e-3)
"""Learning rates; of each way the better one counts."""
TRAINED_ON = ("sympy", "torch", "networkx", "numpy", "transformers", "pandas")
"""Packages whose source the encoder reads, those of them that are installed."""
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def unlabelled(most: int) -> list[str]:
    """Texts of other packages than the standard library's, so many bytes in all."""
    root = Path(sysconfig.get_path("purelib"))
    files = sorted(itertools.chain.from_iterable((root / name).rglob("*.py") for name in TRAINED_ON))
    random.Random(0).shuffle(files)
    texts, size = [], 0
    for file in files:
        texts.append(file.read_text(errors="replace"))
        if (size := size + len(texts[-1])) > most:
            break
    return texts


def make_tokenizer(texts: list[str], folder: Path) -> None:
    """Writes a byte-level BPE that puts [CLS] before a text and [SEP] behind it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, initial_alphabet=alphabet, special_tokens=[*SPECIALS], show_progress=False
    )
    tokenizer.train_from_iterator(texts[:200], trainer)
    around = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    tokenizer.save(str(folder / "tokenizer.json"))


def pretrain(texts: list[str], folder: Path, seconds: float) -> tuple[float, float]:
    """Trains a BERT to fill in masked words for so long, and writes it; its loss at the beginning and at the end."""
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForMaskedLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, last, mask = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
    pieces = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    stream = torch.tensor(list(itertools.chain.from_iterable(piece.ids for piece in pieces)))
    torch.manual_seed(0)
    torch.set_num_threads(1)  # on cores that others use as well, two wait for each other
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=CONTEXT, **SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses: list[float] = []
    began, span = time.perf_counter(), 62
    while (share := (time.perf_counter() - began) / seconds) < 1:
        starts = torch.randint(0, len(stream) - span, (32,))
        ids = torch.stack(
            [torch.cat((torch.tensor([first]), stream[at : at + span], torch.tensor([last]))) for at in starts]
        )
        chosen = (torch.rand(ids.shape) < 0.15) & (ids != first) & (ids != last)
        targets, draw = ids.where(chosen, -100), torch.rand(ids.shape)
        ids = ids.masked_fill(chosen & (draw < 0.8), mask)
        ids = torch.where(chosen & (draw > 0.9), torch.randint(len(SPECIALS), WORDS, ids.shape), ids)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, len(losses) / 50) * (1 - 0.9 * share)
        # Logits of the masked words alone: those of all cost most of a step.
        hidden = model.bert(input_ids=ids).last_hidden_state[chosen]
        loss = torch.nn.functional.cross_entropy(model.cls(hidden), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    print(f"encoder: {len(losses)} steps of 32 x {span + 2} tokens, of {len(stream):,}")
    return sum(losses[:10]) / 10, sum(losses[-50:]) / 50


def write_rows(folder: Path, labelled: int) -> None:
    """Writes snippets to learn from and others to be scored on."""
    rows = list(packages())
    random.Random(1).shuffle(rows)
    for name, some in (("test", rows[:1000]), ("train", rows[1000 : 1000 + labelled])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))


def ways(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each way's name and flags."""
    base = folder / "base"
    shape = {"architecture": "bert", "layers": 2, "hidden_size": 128, "heads": 4, "ffn_size": 512}
    shape |= {"pooling": "first", "head_dense": "tanh", "norm_eps": 1e-12}
    own = [f"--model.{name}={value}" for name, value in shape.items()]
    yield "encoder", [f"--model.init_from={base}"]
    yield "same network", [*own, "--tokenizer.kind=file", f"--tokenizer.file={base / 'tokenizer.json'}"]
    yield "preset", ["--config=configs/classify_packages.yaml"]


def compare(given: argparse.Namespace, folder: Path) -> None:
    """Prints each run's accuracy as it comes, then the best of each way."""
    found = machine()
    print(machine_line(found, ("torch", "transformers")))
    (folder / "base").mkdir()
    texts = unlabelled(given.megabytes << 20)
    make_tokenizer(texts, folder / "base")
    losses = pretrain(texts, folder / "base", given.seconds)
    print(f"encoder: loss of masked words {losses[0]:.2f} at first, {losses[1]:.2f} at last")
    write_rows(folder, given.labelled)
    common = ["--task=classification", "--data.kind=json", f"--data.source={folder / 'train.jsonl'}"]
    common += ["--data.validation=source", f"--data.validation_source={folder / 'test.jsonl'}", "--launch=inline"]
    common += [f"--train.steps={given.steps}", "--train.slots=1", "--train.slot_size=16", "--validation.every=0"]
    common += ["--validation.samples=0", "--optimizer.warmup_steps=30", "--model.dropout=0.1", "--scaling.threads=1"]
    common += [f"--model.context={CONTEXT}"]
    accuracies: dict[str, list[float]] = {}
    for name, flags in ways(folder):
        for rate in RATES:
            run = runs.train(folder / "runs", *flags, *common, f"--optimizer.learning_rate={rate}")
            accuracies.setdefault(name, []).append(100 * run["metrics"]["val_accuracy"])
            print(f"  {name}, rate {rate}: {accuracies[name][-1]:.1f} %", flush=True)
    print(f"accuracy on 1,000 snippets of 20 packages after {given.steps} steps on {given.labelled:,} labelled ones:")
    for name, values in accuracies.items():
        print(f"  {name:<14}{max(values):.1f} %")
    report(given, found, [], accuracies=accuracies, losses=losses)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("encoders", __doc__)
    parser.add_argument("--seconds", type=float, default=240, help="of filling in masked words (default 240)")
    parser.add_argument("--megabytes", type=int, default=16, help="of source without labels (default 16)")
    parser.add_argument("--labelled", type=int, default=1000, help="snippets to learn from (default 1000)")
    parser.add_argument("--steps", type=int, default=200, help="of 16 snippets (default 200)")
    with tempfile.TemporaryDirectory(prefix="encoders-") as scratch:
        compare(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
