"""Models, datasets and losses of users' own, trained as a task: `raystride.fit`.

definition a user's model, data and loss;  `task`: the task of them
dataset    what users pass in as a sequence of samples: arrays, tables, lists, map-style datasets
streams    what cannot be indexed, written into the storage first
shared     data in memory, in Ray's object store once a node
samples    the samples of a dataset, read by other processes, with random generators seeded by sample
network    the network with its loss, as the loop calls a model
set_metrics  metrics of the whole validation set, which are no means over samples
describe   one forward and backward before anything starts: what identifies a model and its data
optimizer  any `torch.optim.Optimizer` as the loop's
"""
