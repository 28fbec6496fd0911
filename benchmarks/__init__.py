"""Each figure of docs/figures.md: a command that prints it beside its peer.

training     training steps beside a plain one-file loop of PyTorch; `--loss`: the loss that a whole training reaches
loop         our loop beside a bare one around the same model; `--ray`: two workers beside DistributedDataParallel
scaling      two workers beside one
startup      from the start of the process to the first step, beside Ray's stock TorchTrainer
packing      padded pairs and whole windows beside packed documents
preparation  raw text to shards, beside load_dataset and map; `--memory`: what ten times the text takes
exactness    kills, stops and resizes that must change no bit, and the cost of exact sums beside DistributedDataParallel
recovery     from the loss of a worker or of a node to the next step
peers        everything beside nanoGPT, PyTorch alone, Hugging Face, Lightning and Ray's own trainers, on one page
launch_cost  what the host takes for a call of our operations, beside PyTorch's attention
remote       shards behind a narrow link: bytes fetched and time waited beside mosaicml-streaming and LitData
scale        what the control plane costs at 8 to 8,192 ranks, which are only spoken for
recorder     a loop that records every step beside one that records none
mutants      small faults drawn over the product's code, and which tests see them (docs/mutants.md)

Ways of doing one thing take turns in the same run; every ratio is taken within its round. All print the machine, versions,
commit and date, take `--rounds`, and write the same as JSON with `--json PATH`. What they share: `pairs` (turns, ratios,
machine), `runs` (our commands as processes), `workers` (ours without Ray), `peers` (what ours is compared with).

    python -m benchmarks.training --json benchmarks/results/training.json
"""
