"""``generate``, ``stream`` and ``prepare``: what a user calls."""

from collections.abc import Sequence

from specjax.generation.job import Job
from specjax.generation.options import asked
from specjax.generation.prepare import job_of
from specjax.generation.result import Result
from specjax.generation.stream import Stream
from specjax.models.lm import LM


def prepare(lm: LM, prompts: str | Sequence, **options) -> Job:
    """Checks a request and builds its arrays, once for all that is done with it.

    Args:
      lm: the target model.
      prompts: a string, a conversation (a list of {"role", "content"} messages), or a list of strings, conversations
        or token-id lists. Arrays of NumPy or JAX count as lists.
      **options: fields of :class:`specjax.Options`.

    Returns:
      A job with the methods ``generate``, ``stream``, ``warmup`` and ``memory``.

    Raises:
      ValueError: for any option or prompt that can't be used, before any device work.
    """
    return job_of(lm, prompts, asked(options))


def generate(lm: LM, prompts: str | Sequence, **options) -> Result:
    """Decodes all prompts together, speculatively; the whole loop runs on the device.

    Args:
      lm, prompts, **options: as of :func:`prepare`.

    Returns:
      Tokens, texts, finish reasons and acceptance records.

    Raises:
      ValueError: for any option or prompt that can't be used, before any device work.
      NoDistributionError: if a row ends up with no finite logit (NaN weights, contradictory masks).
    """
    return job_of(lm, prompts, asked(options)).generate()


def stream(lm: LM, prompts: str | Sequence, **options) -> Stream:
    """Like :func:`generate`, token by token: iterate over the events; ``.result()`` gives the record at any time."""
    return job_of(lm, prompts, asked(options)).stream()


def warmup(lm: LM, prompts: str | Sequence, streaming: bool = False, **options) -> None:
    """Compiles what ``generate`` (or ``stream``) with these arguments will run, and runs one block of it."""
    job_of(lm, prompts, asked(options)).warmup(streaming)
