"""Drafters, one small file each. Every drafter obeys the protocol :class:`specjax.decode.types.Drafter`."""

from specjax.checkpoints.trained_drafters import load, shipped
from specjax.drafters.adaptive import Adaptive, Confidence, CostModel, EntropyGuided, Heuristic
from specjax.drafters.auto import auto
from specjax.drafters.cascade import Cascade
from specjax.drafters.dflash import DFlash
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle import Eagle
from specjax.drafters.first_of import FirstOf
from specjax.drafters.forest import Forest
from specjax.drafters.jacobi import Jacobi
from specjax.drafters.layer_skip import LayerSkip
from specjax.drafters.lookahead import Lookahead
from specjax.drafters.medusa import Medusa
from specjax.drafters.ngram_table import NGramTable
from specjax.drafters.no_draft import NoDraft
from specjax.drafters.oracle import Oracle
from specjax.drafters.pass_ import PaSS
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.drafters.random_draft import RandomDraft
from specjax.drafters.retrieval import Retrieval
from specjax.drafters.sink_window import SinkWindow
from specjax.drafters.tree_model import TreeModel
from specjax.drafting.dynamic_tree import DynamicTree
from specjax.drafting.grow_tree import FixedTree

__all__ = [
    "Adaptive",
    "Cascade",
    "Confidence",
    "CostModel",
    "DFlash",
    "DraftModel",
    "DynamicTree",
    "Eagle",
    "EntropyGuided",
    "FirstOf",
    "FixedTree",
    "Forest",
    "Heuristic",
    "Jacobi",
    "LayerSkip",
    "Lookahead",
    "Medusa",
    "NGramTable",
    "NoDraft",
    "Oracle",
    "PaSS",
    "PromptLookup",
    "RandomDraft",
    "Retrieval",
    "SinkWindow",
    "TreeModel",
    "auto",
    "load",
    "shipped",
]
