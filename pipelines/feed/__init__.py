"""Shards to micro-batches: which sample is where in an epoch, which slots make a step, and the thread that reads ahead.

order   position in the stream of epochs -> (epoch, sample), computed, never stored
plan    step -> the samples of each slot -> the slots of each worker
stream  token position -> ids, from mapped shards (`cache` holds remote ones)
loader  steps, read ahead of the loop
"""
