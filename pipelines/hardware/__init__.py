"""What machines tell of themselves: NVIDIA's and AMD's GPUs, processors' energy, and the peak rates of their data sheets.

A card is read figure by figure, and one that it does not have is left out. Nothing here knows of a training.
"""
