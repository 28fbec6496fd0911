"""From raw files to batches: sources, tokenizers, tasks with losses and scores, preparation, and the samples' order."""
