"""From raw data to a recorded training: the rooms stand in the order in which data flows (see DESIGN in the README)."""
