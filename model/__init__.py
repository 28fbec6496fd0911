"""Networks in plain PyTorch, independent of Ray, MLflow and files.

Shapes are named by letters throughout: B batch, T tokens, C width, H query heads, G key and value heads, D head size,
F feed-forward width, V vocabulary.
"""

if not __name__.startswith("raystride."):
    raise ImportError(f"import raystride.{__name__}, not {__name__}: under two names all of it would be loaded twice")
