"""A rank, from its job to its summary.

job      what a worker is told; travels to every rank
worker   the build lines, in the order in which things depend on each other
"""
