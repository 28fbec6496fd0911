"""The jobs of the command `raystride`: each prints its results and returns an exit code."""
