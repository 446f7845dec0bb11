"""What ``scripts/benchmark.py`` measures: planted weights of a real shape, times beside their floors, and peers.

:mod:`case` is what is measured on, :mod:`measure` how a time is taken, :mod:`table` where it goes; every other module
is one kind of figure.
"""
