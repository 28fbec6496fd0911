"""Choices measured once per machine and cached: the matmul backend on CPUs, the attention backend on GPUs."""
