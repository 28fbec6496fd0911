"""Where what is summed over the workers with a step's gradients lies in its vector.

measured = torch.zeros(len(SUMMED)); measured[LOSS] += loss_sum
"""

LOSS, TARGETS, STOP, OUT_OF_TIME = SUMMED = range(4)
"""Where in `measured` (fp32), which travels with the gradients, the loss sum, the targets, and the numbers of workers that
ask to end are."""
