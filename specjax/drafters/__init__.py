"""Drafters. Each is one small file that obeys :class:`specjax.types.Drafter`."""

from specjax.drafters.model import DraftModel
from specjax.drafters.none import NoDraft
from specjax.drafters.prompt_lookup import PromptLookup

__all__ = ["DraftModel", "NoDraft", "PromptLookup"]
