"""Models, datasets and losses of users' own, trained as a task: `raystride.fit`.

dataset    what users pass in as a sequence of samples: arrays, tables, lists, map-style datasets
streams    what cannot be indexed, written into the storage first
shared     data in memory, in Ray's object store once a node
samples    its samples, read by other processes, with random generators seeded by sample
task       the task, from what the user gives
network    the network with its loss, as the loop calls a model
describe   one forward and backward before anything starts: what identifies a model and its data
apply      a function over a dataset, on all workers: `raystride.predict`
export     a trained model for other programs
optimizer  any `torch.optim.Optimizer` as the loop's
"""
