"""scripts/serve.py as a process."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """The process, and what it has printed."""

    def __init__(self, *args, **env):
        command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--port", "0", *args]
        self.popen = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.popen.stdout), daemon=True)
        self._reader.start()

    def address(self, seconds=240):
        """The address, once the process has said where it serves."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in list(self.lines):
                if found := re.search(r" at (http://\S+)", line):
                    return found[1]
            assert self.popen.poll() is None, self.lines
            time.sleep(0.05)
        raise TimeoutError("".join(self.lines))

    def ended(self, seconds=60):
        """The exit code."""
        code = self.popen.wait(timeout=seconds)
        self._reader.join()
        return code


@contextlib.contextmanager
def serving(*args, **env):
    """The process for a ``with`` block."""
    process = Process(*args, **env)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()
