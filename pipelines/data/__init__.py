"""From raw files to batches: sources, tokenizers, tasks with losses and scores, preparation, and the samples' order.

A task is here whole, with its network, loss and scores, since preparation and feed ask it for samples and batches.

sources     documents from files, the Hugging Face hub and registered functions
tokenizers  ids of a text, and chat templates
tasks       examples of documents, the network, loss and scores
prepare     documents to shards, once for the same data and settings
feed        shards to batches, in an order that is computed
plugins     registers sources, tasks and observers of users' own;  `pretrained`: the base that a run starts from
"""
