"""Checks before a training, of resources, hosts and memory, and the choice of mesh and number of workers."""
