"""Our pages, and MLflow's of our runs, as a person sees them in a browser.

Chromium is the distribution's, which `.ci/tools` brings; without it the tests are skipped. The code that drives it makes the
documentation's pictures, too: python -m tests.browser.pictures
"""
