"""The networks, plain PyTorch: nothing here knows of Ray, MLflow or files.

Shapes are named by letters throughout: B batch, T tokens, C width, H query heads, G key and value heads, D head size,
F feed-forward width, V vocabulary.
"""
