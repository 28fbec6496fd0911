"""`python -m raystride WORD`: the command, if its script is not on the path."""

import sys

from raystride.command import run

sys.exit(run())
