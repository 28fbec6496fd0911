"""The process group of a run: rendezvous, connectivity checks, and collectives of Python objects."""
