"""The measurements of ``scripts/benchmark.py``: times on planted weights of a real shape, beside their floors.

:mod:`case` holds the models and the request. :mod:`timed` takes times. :mod:`table` prints and keeps the figures. Every
other module measures one kind of figure.
"""
