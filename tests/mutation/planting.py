"""How a fault is registered and planted, and the tests that faults are caught by."""

import functools

FAULTS = {}  # name -> (function that plants it, ids of default-run tests that must fail)

LAW = "tests/drafters/test_conformance.py::test_joint_law[noisy twin-rejection]"
ROWS = "tests/drafters/test_conformance.py::test_row_depends_on_neither_slot_nor_neighbours[noisy twin-rejection]"
STOPS = "tests/drafters/test_conformance.py::test_greedy_is_plain_at_every_stop_and_limit[noisy twin-rejection]"
SELF = "tests/drafters/test_conformance.py::test_self_draft_is_accepted_whole_under_every_setting[rejection]"
LAW_OF = "tests/drafters/test_conformance.py::test_joint_law[{}-rejection]".format
PATH = "tests/drafters/test_conformance.py::test_path_independence[noisy twin]"
WELL_FORMED = "tests/drafters/test_conformance.py::test_proposals_are_well_formed[noisy twin]"
TABLE_LAW = "tests/verify/test_verifiers.py::test_joint_law_over_rounds[drawn-rejection]"
GREEDY_Q = "tests/drafters/test_conformance.py::test_a_greedy_draft_is_a_point_mass[0.0]"
RESIDUAL = "tests/verify/test_verifiers.py::test_the_residual_is_normalised_and_keeps_its_zeros[rejection]"
BONUS = "tests/verify/test_verifiers.py::test_the_bonus_follows_the_last_accepted_token[rejection]"
SIBLINGS = "tests/verify/test_siblings.py::test_siblings_leave_the_targets_law[0-2-not_replaced]"
PADDING = "tests/verify/test_verifiers.py::test_padding_is_never_accepted[rejection]"
FLOAT32 = "tests/drafters/test_drafters.py::test_bfloat16_models_are_sampled_and_judged_in_float32[{}]".format
EQUAL_DRAFT = "tests/verify/test_verifiers.py::test_a_draft_equal_to_the_target_is_accepted_whole[3-rejection]"
TREE_LAW = LAW_OF("tree")
TREE_TEXT = "tests/drafters/test_conformance.py::test_coupled_is_plain_token_for_token_under_sampling[tree]"
TREE_CACHE = "tests/drafters/test_trees.py::test_after_a_tree_the_cache_holds_the_accepted_path[None]"
TREE_SIBLINGS = "tests/drafters/test_trees.py::test_the_first_token_has_the_targets_law[{}-3-False]".format
KERNEL = "tests/models/test_attention.py::test_the_kernel_is_the_plain_function[triton-{}]".format
GRADIENT = "tests/models/test_attention.py::test_a_model_and_its_gradient_are_the_same_with_the_kernel"
BUSY = "tests/engine/test_replay.py::test_a_busy_engine_gives_each_request_the_tokens_it_has_alone[{}]".format
SWAPPED = (
    "tests/engine/test_swap.py::test_a_request_that_was_swapped_out_has_the_tokens_and_bits_it_has_alone[{}]".format
)
SAMPLES = (
    "tests/engine/test_samples.py::test_samples_are_those_of_requests_alone_and_the_prompt_is_read_once[{}]".format
)
PAGE_KEYS = "tests/engine/test_pages.py::test_keys_cover_whole_pages_their_next_token_and_the_salt"
BLOCK = "tests/verify/test_block.py::test_block_draws_anew_in_every_round[Block]"
TRAVERSAL = "tests/verify/test_traversal.py::test_nodes_with_different_parents_are_drawn_independently[not_replaced]"
WALK = "tests/verify/test_traversal.py::test_the_first_node_that_passes_on_the_walk_is_found"
BLOCK_LAW = "tests/verify/test_block.py::test_block_commits_with_the_targets_law[3-2]"
TEXTS_OF_BEAMS = (
    "tests/generation/test_beams.py::"
    "test_texts_and_scores_are_those_of_transformers_and_speculation_calls_the_target_less_often"
)
DRAFT_BEAMS = "tests/generation/test_beams.py::test_a_draft_that_is_the_target_is_accepted_whole"
CHILD = "tests/decode/test_beam_rules.py::test_a_child_sees_what_its_parent_saw"


def fault(*caught_by):
    def register(plant):
        FAULTS[plant.__name__] = (plant, caught_by)
        return plant

    return register


def wrap(owner, name, make):
    """Replaces ``owner.name`` by ``make(the original)``."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))
