"""One model over several devices: two files of tests/support, each in a process that sees that many CPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["not slow", "slow"])
@pytest.mark.parametrize("file, count", [("eight_devices.py", 8), ("rows_over_a_mesh.py", 4)])
def test_on_several_devices(file, count, which):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-m", which, f"tests/support/{file}"]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and " passed" in run.stdout and "skipped" not in run.stdout, run.stdout[-6000:]
