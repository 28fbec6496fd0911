"""Raystride: say what to train; it trains it reliably on a Ray cluster, and shows with evidence how it should be run there.

The folders of the repository are the packages below this one (`raystride/model` links to `model`, and so on), so that a
user's own `model.py` stands in nobody's way.
"""

__version__ = "0.2.0"
