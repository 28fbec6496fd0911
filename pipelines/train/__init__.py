"""The one train loop and what it is made of; everything here imports with torch and numpy alone.

state       what a resumed run must know, in one small dataclass
step        forward and backward of a step's micro-batches, norm, clipping, update
loop        steps, logging, validation, checkpoints, the end
optimizer   update rules and schedules
validation  the same samples in the same batches for any number of workers
checkpoint  saving in the background, loading, retention;  storage: the files of one checkpoint;  names: how they are called
"""
