"""Adapter training: the frozen base, PEFT files, initialisation from a run, several adapters in lock-step."""
