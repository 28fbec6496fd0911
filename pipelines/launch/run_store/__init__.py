"""Runs in a storage: location, lease, stored settings, resuming, and the `runs` commands."""
