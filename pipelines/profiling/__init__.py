"""Close looks at some steps: PyTorch's profiler, Nsight's two, memory, and the stacks of steps that stand still.

profile         the observer that opens and closes the window of steps, and its page
torch_profiler nsight   the tools; `nsight_commands`: how processes are started under them, for the driver
stalls          a step that does not end, written down
"""
