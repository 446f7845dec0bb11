"""Times early exit on a planted target whose first layers predict the output at a chosen acceptance rate."""

import dataclasses

from specjax.drafters import LayerSkip
from specjax.drafting import theory
from specjax.measure.benchmark.case import Case, stored_as
from specjax.measure.benchmark.table import Table
from specjax.measure.benchmark.timed import generations, weight_bytes
from specjax.testing import planted_exit


def early_exit(case: Case, table: Table, exit_layer: int | None = None) -> None:
    """Times plain decoding and rounds of a model of the target's shape whose first layers draft.

    Args:
      case: the models and the request.
      table: the table that the figures go to.
      exit_layer: the number of layers that draft. None: a quarter of the layers.
    """
    target, size = case.target, case.num_speculative_tokens
    after = max(1, target.config.num_hidden_layers // 4) if exit_layer is None else exit_layer
    lm, successor = planted_exit(target.config, after, case.alpha, case.seed, target.dtype, mesh=target.mesh)
    own = dataclasses.replace(case, target=stored_as(target, lm), successor=successor)
    common = dict(max_new_tokens=case.max_new_tokens)
    drafting = dict(drafter=LayerSkip(exit_layer=after), num_speculative_tokens=size, **common)
    prompts = own.prompts()
    runs = generations(own.target, prompts, {"plain": common, "exit": drafting})
    plain, out = runs["plain"], runs["exit"]
    cost = weight_bytes(own.target, after) / weight_bytes(own.target)
    right = out.tokens[0] == own.planted_text(prompts[0], case.max_new_tokens)
    table.add(
        f"round, early exit after layer {after}",
        out.per_round,
        (1 + size * cost) * own.step_floor,
        f"{out.totals.tokens_per_step:.2f} a round, {out.tokens_per_second / plain.tokens_per_second:.2f} x plain "
        f"(theorem 3.8 at the floors, c = {cost:.2f}: {theory.walltime_factor(case.alpha, size, cost):.2f}; best K "
        f"{theory.best_gamma(case.alpha, cost, 16)}), text right: {right}",
        tokens_per_second=out.tokens_per_second,
        tokens_per_round=out.totals.tokens_per_step,
    )
