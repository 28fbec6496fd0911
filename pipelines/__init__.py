"""From raw data to a recorded training: the rooms stand in the order in which data flows (see `docs/house.md`)."""

if not __name__.startswith("raystride."):
    raise ImportError(f"import raystride.{__name__}, not {__name__}: under two names all of it would be loaded twice")
