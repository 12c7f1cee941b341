"""`python -m lmhead.app`: the page, as a Space starts it."""

from lmhead.app import launch

launch().wait()
