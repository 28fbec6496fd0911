"""Hardware readings: NVIDIA and AMD GPUs, and CPU energy (RAPL).

Each figure of a card is read on its own, and figures that it lacks are left out. Nothing here depends on the training code.
"""
