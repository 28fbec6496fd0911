"""A rank, from its job to its summary.

job        the description of a run that travels to every rank
build      builds the parts of a training in the order of their dependencies
run        runs one worker: observers, training, summary, sample
attention_backend, matmul_backend    the fastest of the products that this machine has
rehearsal  a short training on the driver's host that times numbers of workers
"""
