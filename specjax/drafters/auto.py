"""The drafter that suits a model when nobody chooses one."""

from specjax.checkpoints import trained_drafters
from specjax.decode.types import Drafter
from specjax.drafters.first_of import FirstOf
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.models.lm import LM


def auto(lm: LM) -> Drafter:
    """Prompt lookup, and where the text has no match, the EAGLE-3 head that comes with specjax for the model.

    For a model without such a head: prompt lookup alone. The head is found by the model's name, ``lm.name``.
    """
    head = None if lm.name is None else trained_drafters.shipped_for(lm.name)
    return PromptLookup() if head is None else FirstOf(PromptLookup(), trained_drafters.load(head, lm))
