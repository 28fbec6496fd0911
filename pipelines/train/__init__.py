"""One training on its workers: loop and validation, strategies, checkpoints, adapters, users' models, the memory needed.

step        forward and backward of a step's micro-batches, norm, clipping, update
loop        steps, logging, validation, checkpoints, the end of a run
optimizer   update rules and schedules
validation  the same samples in the same batches for any number of workers
guard       NaN and loss spikes: skip, rewind or stop
precision   dtypes of parameters, computation and reduction
"""
