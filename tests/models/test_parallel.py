"""One model over several devices: tests/support/eight_devices.py, in a process that sees eight CPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_on_eight_devices(which):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-m", which, "tests/support/eight_devices.py"]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and " passed" in run.stdout and "skipped" not in run.stdout, run.stdout[-6000:]
