"""Tensor, pipeline and context parallelism on a mesh of workers."""
