"""What ours is compared with: programs as a person would write them by the libraries' own documentation.

plain_loop     nanoGPT in one file: the model, random crops of a memory-mapped file, a loop
bare_loop      our model, our batches and nothing else of ours; alone or under torchrun with DistributedDataParallel
stock_trainer  Ray's TorchTrainer with prepare_model, up to its first step

All on one page by `python -m benchmarks.peers`, each a whole training of `plain_loop`'s model, with checkpoints:

torch_loop     PyTorch alone: DataLoader, DistributedDataParallel under torchrun, torch.save
hf_trainer     `transformers.Trainer`; `hf_prepare`: `datasets.map`
accelerate_loop, lightning_loop    Accelerate; Lightning
torch_trainer, ray_data_loop       Ray's TorchTrainer; the same fed by Ray Data, in the shape of PyTorch's tutorial
nanogpt        nanoGPT's own train.py
litgpt_loop    litgpt's `pretrain.setup`

What they share: `protocol` (flags and events), `characters` (data). What runs them: `ways`, `environments`, `processes`,
`rows`, `counting`, `page`.

    python -m benchmarks.peers --only inline accelerate --rows start speed
    python -m benchmarks.peers.plain_loop --text input.txt --steps 200
"""
