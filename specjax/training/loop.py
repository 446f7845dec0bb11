"""The training loop of every drafter: AdamW over an objective's weights, resumable bit for bit from any checkpoint."""

import dataclasses
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.decode import random
from specjax.models.lm import LM
from specjax.models.quantized import dequantize, is_quantized
from specjax.report.progress import bar
from specjax.training.texts import Texts

Terms = tuple[jax.Array, dict[str, jax.Array]]  # the loss, and figures to watch


class Objective(Protocol):
    """What is trained: a pytree of all that stays fixed, which makes trainable weights and judges them.

    It is given a key for whatever a step leaves to chance, a function of seed and step; None where it is measured.
    """

    def init(self, seed: int) -> dict: ...

    def __call__(
        self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None
    ) -> Terms: ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How it is trained. Learning rate: linear warm-up, then cosine to a tenth."""

    steps: int
    batch: int = 32
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def optimizer(self) -> optax.GradientTransformation:
        warmup = min(self.warmup, max(1, self.steps // 2))
        rate = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, warmup, max(self.steps, warmup + 1), self.learning_rate / 10
        )
        decays = partial(jax.tree.map, lambda x: x.ndim > 1)  # matrices, not norms and biases
        adam = optax.adamw(rate, b2=0.95, weight_decay=self.weight_decay, mask=decays)
        return optax.chain(optax.clip_by_global_norm(self.clip), adam)


def as_f32(params: dict) -> dict:
    """Weights, quantised or not, as new arrays that a step may overwrite."""
    return jax.tree.map(lambda x: jnp.array(dequantize(x), jnp.float32), params, is_leaf=is_quantized)


class TrainState(NamedTuple):
    step: jax.Array  # i32[], steps done
    params: dict
    optimizer: Any


def start(objective: Objective, recipe: Recipe) -> TrainState:
    """The state before the first step."""
    params = objective.init(recipe.seed)
    return TrainState(jnp.int32(0), params, recipe.optimizer().init(params))


@partial(jax.jit, static_argnames="recipe", donate_argnames="state")
def train_step(
    objective: Objective, target: LM, state: TrainState, tokens: jax.Array, weights: jax.Array, *, recipe: Recipe
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step on texts i32[B, T] with weights f32[B, T]."""
    key = jax.random.fold_in(random.key(recipe.seed), state.step)
    judge = jax.value_and_grad(lambda params: objective(params, target, tokens, weights, key), has_aux=True)
    (_, seen), grads = judge(state.params)
    updates, optimizer = recipe.optimizer().update(grads, state.optimizer, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer), seen


@jax.jit
def judge(objective: Objective, target: LM, params: dict, tokens: jax.Array, weights: jax.Array):
    """The figures of :func:`train_step` without a step."""
    return objective(params, target, tokens, weights, None)[1]


def batch_of(texts: Texts, recipe: Recipe, step: int) -> tuple[jax.Array, jax.Array]:
    """The texts of a step, a function of the step alone: epochs in an order of their own, cut into batches."""
    per_epoch = max(1, len(texts.tokens) // recipe.batch)
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng([recipe.seed, epoch]).permutation(len(texts.tokens))
    rows = np.resize(order, per_epoch * recipe.batch)[place * recipe.batch : (place + 1) * recipe.batch]
    chosen = texts.rows(rows)
    return jnp.asarray(chosen.tokens, jnp.int32), jnp.asarray(chosen.weights())


def train(
    objective: Objective,
    target: LM,
    texts: Texts,
    held_out: Texts,
    recipe: Recipe,
    folder: str | Path | None = None,
    every: int = 500,
    seconds: float = float("inf"),
    progress: Callable[[dict], None] = lambda line: None,
) -> tuple[dict, list[dict]]:
    """Runs the recipe, from the newest checkpoint in ``folder`` if there is one.

    Args:
      objective: what is trained.
      target: the model it drafts for.
      texts: trained on, in a new order each epoch.
      held_out: measured on, in one batch.
      recipe: how.
      folder: where checkpoints go, one every ``every`` steps and one at the end.
      every: steps between measurements.
      seconds: after which no further step is begun.
      progress: told of each measurement.

    Returns:
      The weights, and the curve: a dict for each measurement.

    Raises:
      ValueError: the folder holds checkpoints of another objective, recipe (but for its steps) or texts.
    """
    if folder is not None:
        _claim(Path(folder), _identity(objective, texts, recipe))
    state = start(objective, recipe)
    manager = None if folder is None else _manager(folder)
    if manager is not None and manager.latest_step() is not None:
        state = _restore(manager, state)
    test = jnp.asarray(held_out.tokens, jnp.int32), jnp.asarray(held_out.weights())
    curve, began, step = [], time.perf_counter(), int(state.step)
    line = bar(desc="training", total=recipe.steps, initial=step, unit="step")
    while step < recipe.steps:
        state, seen = train_step(objective, target, state, *batch_of(texts, recipe, step), recipe=recipe)
        step += 1
        line.update()
        out_of_time = step % 10 == 0 and time.perf_counter() - began > seconds
        if step % every == 0 or step == recipe.steps or out_of_time:
            found = judge(objective, target, state.params, *test)
            figures = {f"held_out_{name}": np.asarray(x, np.float64).round(4).tolist() for name, x in found.items()}
            figures |= {f"train_{name}": np.asarray(x, np.float64).round(4).tolist() for name, x in seen.items()}
            curve.append({"step": step, "seconds": round(time.perf_counter() - began, 1), **figures})
            progress(curve[-1])
            if manager is not None:
                _save(manager, state)
        if out_of_time:
            break
    line.close()
    if manager is not None:
        manager.close()
    return state.params, curve


def _identity(objective: Objective, texts: Texts, recipe: Recipe) -> str:
    """What makes a run what it is, but for its steps."""
    digest = hashlib.sha256(repr((dataclasses.replace(recipe, steps=0), jax.tree.structure(objective))).encode())
    for array in (*jax.tree.leaves(objective), texts.tokens, texts.lengths, texts.own):
        digest.update(repr((array.shape, array.dtype)).encode() + np.asarray(array).tobytes())
    return digest.hexdigest()


def _claim(folder: Path, identity: str) -> None:
    mark = folder / "run.txt"
    if mark.is_file() and mark.read_text("utf-8") != identity:
        raise ValueError(
            f"{folder} holds checkpoints of another run (other texts, loss, shape, seed or recipe); remove it or give "
            "another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(identity, "utf-8")


def _manager(folder: str | Path):
    import orbax.checkpoint as ocp  # slow to import

    return ocp.CheckpointManager(Path(folder).absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def _save(manager, state: TrainState) -> None:
    import orbax.checkpoint as ocp

    manager.save(int(state.step), args=ocp.args.StandardSave(state._asdict()))
    manager.wait_until_finished()  # the next step's donated buffers must not be written under it


def _restore(manager, like: TrainState) -> TrainState:
    import orbax.checkpoint as ocp

    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
    return TrainState(**manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(shapes)))
