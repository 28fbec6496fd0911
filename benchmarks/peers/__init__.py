"""What ours is compared with: programs as a person would write them by the libraries' own documentation.

plain_loop     nanoGPT in one file: the model, random crops of a memory-mapped file, a loop
bare_loop      our model, our batches and nothing else of ours; alone or under torchrun with DistributedDataParallel
stock_trainer  Ray's TorchTrainer with prepare_model

    python -m benchmarks.peers.plain_loop --text input.txt --steps 200
"""
