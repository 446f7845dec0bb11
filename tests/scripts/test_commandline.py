"""How every script meets its user: output in any encoding, closed pipes, progress."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import script as script_of

ROOT = Path(__file__).resolve().parents[2]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
# The one module, of an empty package: importing all of specjax would take seconds a process.
RUN = f"""import sys, types
sys.path.insert(0, {str(ROOT / "scripts")!r})
sys.modules["specjax"] = package = types.ModuleType("specjax")
package.__path__ = [{str(ROOT / "specjax")!r}]
from cli.parser import refusing
sys.exit(refusing(lambda: ACTION))"""


def script(action, encoding="utf-8", **how):
    """A process that does what a script does with its action."""
    command = [sys.executable, "-X", f"utf8={int(encoding == 'utf-8')}", "-c", RUN.replace("ACTION", action)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONIOENCODING": encoding}, **how)


def test_text_is_never_lost_to_the_encoding_of_the_output():
    text = "caf\\u00e9 \\u2192 \\U0001f600 \\ud800"
    for encoding in ("ascii", "cp1252", "utf-8"):
        done = script(f"print('{text}') or print('{text}', file=sys.stderr)", encoding, **PIPES)
        out, err = done.communicate(timeout=60)
        assert done.returncode == 0, err
        assert out == err
        for character in "café→😀\ud800":
            written = character.encode(encoding, "backslashreplace")
            assert written in out, (encoding, character)


def test_an_error_is_told_in_any_encoding():
    done = script("open('no\\u2192where')", "ascii", **PIPES)
    assert b"no\\u2192where" in done.communicate(timeout=60)[1] and done.returncode == 2


def test_a_closed_pipe_ends_quietly():
    """At once, while text is printed; and at the end, where the last of the text leaves the buffer."""
    for action in ("[print(i, flush=True) for i in range(100_000)] and None", "print('a')"):
        done = script(f"sys.stdin.read() and None or {action}", stdin=subprocess.PIPE, **PIPES)
        done.stdout.close()
        done.stdin.close()
        assert done.stderr.read() == b""
        assert done.wait(timeout=60) == 141  # as of a program that SIGPIPE ends


@pytest.mark.parametrize("name, args", [
    ("benchmark", []), ("generate", []), ("parity", []), ("train_drafter", ["--kind", "pass"]),
    *((name, ["--prompts", "x"]) for name in ("compare_drafters", "measure_alpha", "search_layers", "spec_bench")),
])  # fmt: skip
def test_every_script_that_compiles_keeps_its_programs(capsys, monkeypatch, name, args):
    def asked(where):
        raise ValueError(f"asked for {where}")

    module = script_of(name)
    monkeypatch.setattr(module, "compilation_cache_of_script", asked)
    assert module.main(args) == 2 and module.main([*args, "--compilation-cache", "none"]) == 2
    assert capsys.readouterr().err.splitlines() == ["error: asked for None", "error: asked for none"]
