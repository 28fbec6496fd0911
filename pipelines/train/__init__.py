"""One training on its workers: loop and validation, strategies, checkpoints, adapters, users' models, the memory needed.

step        forward and backward of a step's micro-batches, norm, clipping, update
loop        steps, logging, validation, checkpoints, the end of a run
optimizer   update rules and schedules
validation  the same samples in the same batches for any number of workers
guard       NaN and loss spikes: skip, rewind or stop
precision   dtypes of parameters, computation and reduction

worker builds and runs all of it on a rank, with `strategies`, `checkpoint`, `lora` and `own_model`; `distributed` has the
collectives, `memory` estimates the bytes before a start.
"""
