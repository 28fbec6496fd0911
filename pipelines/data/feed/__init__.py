"""Data loading: sample order, step plan, shard reading, node cache for remote shards, and a prefetching loader.

order   position in the stream of epochs -> (epoch, sample), computed, never stored
plan    step -> samples of each slot -> slots of each worker
stream  token position -> ids, from memory-mapped shards (`cache` holds remote ones)
loader  steps, prefetched by a thread
"""
