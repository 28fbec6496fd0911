"""Profiling of a window of steps (PyTorch, Nsight Systems and Compute, memory), and stack dumps of stalled steps.

profile         the observer that opens and closes the window of steps, and its page
torch_profiler nsight   the profilers; `nsight_commands`: command lines to start processes under Nsight, for the driver
stalls          stack dumps of steps that do not end
"""
