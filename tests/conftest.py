"""What all tests share: the tests' own folder on the path, and slow sweeps kept out of the default run (pyproject)."""
