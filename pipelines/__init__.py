"""The training pipeline, from raw data to a recorded run, in eight wings (see `docs/architecture.md`)."""

if not __name__.startswith("raystride."):
    raise ImportError(f"import raystride.{__name__}, not {__name__}: under two names all of it would be loaded twice")
