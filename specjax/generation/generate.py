"""The functions that a user calls: ``generate``, ``stream``, ``prepare`` and ``warmup``."""

from collections.abc import Sequence

from specjax.decode.numeric import is_int
from specjax.generation.beams import beam_search
from specjax.generation.job import Job
from specjax.generation.options import asked
from specjax.generation.prepare import job_of
from specjax.generation.result import Result
from specjax.generation.stream import Stream
from specjax.models.lm import LM


def prepare(lm: LM, prompts: str | Sequence, **options) -> Job:
    """Checks a request and builds its arrays. The job can then be run, streamed, compiled and measured.

    Args:
      lm: the target model.
      prompts: a string, a conversation (a list of {"role", "content"} messages), or a list of strings, conversations
        or token-id lists. NumPy and JAX arrays count as lists. A model with an encoder takes them as sources.
      **options: fields of :class:`specjax.Options`.

    Returns:
      A job with the methods ``generate``, ``stream``, ``warmup`` and ``memory``.

    Raises:
      ValueError: an option or a prompt can't be used. Nothing has run on the device by then.
    """
    return job_of(lm, prompts, asked(options))


def generate(lm: LM, prompts: str | Sequence, **options) -> Result:
    """Decodes all prompts together, speculatively. The whole loop runs on the device.

    If there are stop strings, the host calls each round and looks for the strings. With ``num_beams`` above 1 this is
    beam search (docs/beams.md), for which a ``DraftModel`` can draft.

    Args:
      lm, prompts, **options: as in :func:`prepare`.

    Returns:
      The tokens, texts, finish reasons and metrics of each prompt. Of beam search: those of the best
      ``num_return_sequences`` texts of each prompt, with their scores.

    Raises:
      ValueError: an option or a prompt can't be used. Nothing has run on the device by then.
      NoDistributionError: no token of a row has a finite logit, because the weights hold NaN or because the sampling
        options forbid every token. Of beam search: fewer texts than ``num_return_sequences`` have a finite score.
    """
    given = asked(options)
    one = is_int(given.num_beams) and given.num_beams == 1  # beam_search refuses True, which equals 1
    return job_of(lm, prompts, given).generate() if one else beam_search(lm, prompts, given)


def stream(lm: LM, prompts: str | Sequence, **options) -> Stream:
    """Decodes like :func:`generate`, but gives each token as soon as its round ends.

    Args:
      lm, prompts, **options: as in :func:`prepare`.

    Returns:
      An iterator over events, one for each token. Its method ``result()`` gives the result so far at any time.

    Raises:
      ValueError: an option or a prompt can't be used. Nothing has run on the device by then.
    """
    return job_of(lm, prompts, asked(options)).stream()


def warmup(lm: LM, prompts: str | Sequence, streaming: bool = False, **options) -> None:
    """Compiles the programs that :func:`generate` will run with these arguments, and runs one block.

    Args:
      lm, prompts, **options: as in :func:`prepare`.
      streaming: whether to compile for :func:`stream` in place of :func:`generate`.

    Raises:
      ValueError: an option or a prompt can't be used. Nothing has run on the device by then.
    """
    job_of(lm, prompts, asked(options)).warmup(streaming)
