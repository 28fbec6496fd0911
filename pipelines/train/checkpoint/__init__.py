"""Checkpoints: distributed save planning, sharded files, verification, loading under any strategy, and retention."""
