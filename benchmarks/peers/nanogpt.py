"""nanoGPT's own `train.py` with the flags that its README gives for CPUs, and its output as the peers' progress.

Its first argument is a clone of karpathy/nanoGPT in which `data/shakespeare_char/prepare.py` has run on the same text. Its
loss on the way is its own estimate, of 20 random batches; the last is its last checkpoint's, on the whole tail. It has
no way to train in several processes on CPUs: under torchrun it asks for CUDA devices.

    python -m benchmarks.peers.nanogpt nanoGPT --text input.txt --progress progress.jsonl --folder out --steps 200
"""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.peers.protocol import NETWORK, Job, Progress, read_job

FLAGS = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --dropout=0.0 --always_save_checkpoint=True "
    f"--n_layer={NETWORK.layers} --n_head={NETWORK.heads} --n_embd={NETWORK.width} --block_size={NETWORK.block} "
    f"--batch_size={NETWORK.batch}"
)
NEVER = 1_000_000_000
"""Steps that no training comes to."""


def train(clone: Path, job: Job) -> None:
    """Runs `train.py`; each of its lines becomes an event."""
    flags = [
        *FLAGS.split(),
        f"--out_dir={job.folder.resolve()}",
        f"--max_iters={job.steps}",
        f"--lr_decay_iters={job.steps}",
        f"--eval_interval={job.checkpoint_every or job.validate_every or NEVER}",
        f"--init_from={'resume' if job.resume else 'scratch'}",
    ]
    command = [sys.executable, "-u", "train.py", "config/train_shakespeare_char.py", *flags]
    progress = Progress(job)
    with subprocess.Popen(command, cwd=clone, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if found := re.match(r"iter (\d+): loss", line):
                progress.step(int(found[1]) + 1)
            elif (found := re.match(r"step (\d+): .*val loss ([\d.]+)", line)) and int(found[1]):
                progress.validation(int(found[1]), float(found[2]), sampled=True)
    if process.returncode:
        raise SystemExit(f"train.py ended with {process.returncode}")
    finish(clone, job, progress)


def finish(clone: Path, job: Job, progress: Progress) -> None:
    """The loss of its last checkpoint on the whole tail, and the checkpoint's parameters."""
    if not (file := job.folder / "ckpt.pt").exists():
        return progress.done()
    import torch

    from benchmarks.peers.characters import read_characters, validate

    sys.path.insert(0, str(clone))
    theirs = import_module("model")  # of the clone

    class Loss(theirs.GPT):  # type: ignore[misc, name-defined]
        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(ids, targets)[1]  # type: ignore[no-any-return]

    saved = torch.load(file)
    model = Loss(theirs.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    if job.validate_every:
        progress.validation(saved["iter_num"], validate(model, read_characters(job.text).validation))
    return progress.done(model)


if __name__ == "__main__":
    train(Path(sys.argv[1]).resolve(), read_job("nanogpt", __doc__, sys.argv[2:]))
