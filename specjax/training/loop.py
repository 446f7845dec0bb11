"""The training loop of every drafter and of models from scratch: AdamW on an objective's weights.

The texts lie on the device, and one call of a compiled program makes several steps.

A run that is resumed from a checkpoint gives the same weights, bit for bit, as a run without a break.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from specjax.decode import random
from specjax.decode.numeric import SMALLEST_FLOAT, check_counts, check_number
from specjax.models.lm import LM
from specjax.models.model import check_no_encoder
from specjax.models.quantized import dequantize, is_quantized
from specjax.report.progress import bar
from specjax.training.mark import mark
from specjax.training.texts import Texts

CURVE = "curve.json"  # beside the checkpoints
STEPS = 10  # the most training steps of one dispatch

Terms = tuple[jax.Array, dict[str, jax.Array]]  # the loss, and figures to report


class Objective(Protocol):
    """A training task. It makes the trainable weights and computes their loss.

    An objective is a pytree. Its leaves are all arrays that stay fixed in training.
    """

    def init(self, seed: int) -> dict:
        """The trainable weights before the first step, f32."""
        ...

    def __call__(
        self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None
    ) -> Terms:
        """The loss of the weights on some texts.

        Args:
          params: the trainable weights.
          target: the model that the drafter drafts for.
          tokens: i32[B, T], the texts.
          weights: f32[B, T], the weight of each token in the loss.
          key: key[] for random choices of a training step, a function of seed and step. None: the loss is only
            measured.

        Returns:
          The loss f32[], and figures to report.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of a training run.

    The learning rate rises linearly during the warm-up, and then falls as a cosine to a tenth of its maximum.

    Args:
      steps: steps of the whole run.
      batch: texts a step.
      learning_rate: the maximum of the learning rate.
      warmup: steps of the warm-up. A longer one than half of ``steps`` is cut to that.
      weight_decay: the weight decay of AdamW, on matrices only.
      clip: the largest global norm of a gradient.
      seed: the seed of the first weights, of the order of the texts, and of each step's random choices.

    Raises:
      ValueError: batch is no integer of at least 1; steps, warmup or seed is none of at least 0; weight_decay is no
        number from 0 on; or learning_rate or clip is no positive number.
    """

    steps: int
    batch: int = 32
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self):
        check_counts(1, batch=self.batch)
        check_counts(0, steps=self.steps, warmup=self.warmup, seed=self.seed)
        check_number("weight_decay", self.weight_decay, 0)
        check_number("learning_rate", self.learning_rate, SMALLEST_FLOAT)
        check_number("clip", self.clip, SMALLEST_FLOAT)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW with the learning rate's schedule, after gradients are clipped."""
        warmup = min(self.warmup, max(1, self.steps // 2))
        rate = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, warmup, max(self.steps, warmup + 1), self.learning_rate / 10
        )
        decays = partial(jax.tree.map, lambda x: x.ndim > 1)  # matrices decay; norms and biases do not
        adam = optax.adamw(rate, b2=0.95, weight_decay=self.weight_decay, mask=decays)
        return optax.chain(optax.clip_by_global_norm(self.clip), adam)


def as_f32(params: dict) -> dict:
    """Weights, quantised or not, as new f32 arrays. A training step may overwrite these."""
    return jax.tree.map(lambda x: jnp.array(dequantize(x), jnp.float32), params, is_leaf=is_quantized)


class TrainState(NamedTuple):
    # i32[] How many steps are done.
    step: jax.Array
    # The trainable weights, f32.
    params: dict
    # The optimizer's state.
    optimizer: Any


def start(objective: Objective, recipe: Recipe) -> TrainState:
    """The state before the first step."""
    params = objective.init(recipe.seed)
    return TrainState(jnp.int32(0), params, recipe.optimizer().init(params))


def train_step(
    objective: Objective, target: Any, state: TrainState, tokens: jax.Array, weights: jax.Array, recipe: Recipe
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One training step on texts i32[B, T] with weights f32[B, T]. Not compiled by itself.

    Returns:
      The new state, and the objective's figures before the step.
    """
    key = jax.random.fold_in(random.key(recipe.seed), state.step)
    loss = jax.value_and_grad(lambda params: objective(params, target, tokens, weights, key), has_aux=True)
    (_, seen), grads = loss(state.params)
    updates, optimizer = recipe.optimizer().update(grads, state.optimizer, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer), seen


@partial(jax.jit, static_argnames="recipe", donate_argnames="state")
def train_steps(
    objective: Objective, target: Any, state: TrainState, texts: tuple, rows: jax.Array, count: int, *, recipe: Recipe
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Some training steps. Their number is no part of the program, so a resumed run has the bits of a whole one.

    Args:
      objective, target, recipe: as in :func:`train`. The target may be None.
      state: the state before the first step; its buffers are used again.
      texts: the tokens [N, T] and the weights f32[N, T] of all texts.
      rows: i32[STEPS, B], the numbers of the texts of each step.
      count: the number of steps, from 1 to STEPS.

    Returns:
      The new state, and the objective's figures before the last step.
    """

    def step(i: jax.Array | int, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        tokens, weights = (x[rows[i]] for x in texts)
        return train_step(objective, target, state, tokens.astype(jnp.int32), weights, recipe)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, 0, state)[1])
    return lax.fori_loop(0, count, lambda i, carry: step(i, carry[0]), (state, nothing))


@jax.jit
def judge(objective: Objective, target: Any, params: dict, tokens: jax.Array, weights: jax.Array):
    """The objective's figures on texts i32[B, T] with weights f32[B, T], without a training step."""
    return objective(params, target, tokens, weights, None)[1]


def rows_of(count: int, recipe: Recipe, step: int) -> np.ndarray:
    """The numbers i64[B] of the texts of one step, of ``count`` texts.

    Each epoch has a random order of the texts, which is cut into batches. So the batch depends only on the recipe and
    on the number of the step.
    """
    per_epoch = max(1, count // recipe.batch)
    epoch, place = divmod(step, per_epoch)
    order = _order(recipe.seed, epoch, count)
    return np.resize(order, per_epoch * recipe.batch)[place * recipe.batch : (place + 1) * recipe.batch]


@lru_cache(maxsize=2)  # the steps of one dispatch may be of two epochs
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order i64[count] of the texts in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def train(
    objective: Objective,
    target: LM | None,
    texts: Texts,
    held_out: Texts,
    recipe: Recipe,
    folder: str | Path | None = None,
    every: int = 500,
    seconds: float = float("inf"),
    progress: Callable[[list[dict]], None] = lambda curve: None,
) -> tuple[dict, list[dict]]:
    """Runs a recipe. If ``folder`` holds checkpoints, the run starts from the newest one.

    Args:
      objective: the training task.
      target: the model that the drafter drafts for. None: the objective trains a model that drafts for none.
      texts: the training texts, in a new order each epoch.
      held_out: the texts for measurements, in one batch.
      recipe: the settings of the run.
      folder: where checkpoints and the curve are written: every ``every`` steps and at the end. None: nowhere.
      every: steps between measurements.
      seconds: how long the run may go on. The time is looked at after each dispatch of at most STEPS steps.
      progress: is called after each measurement, with the curve so far.

    Returns:
      The weights, and the curve: one dict for each measurement of the whole run, those before a break included.

    Raises:
      ValueError: ``every`` is below 1, the target has an encoder, or the folder is of another run, but for the
        recipe's ``steps``.
    """
    if every < 1:
        raise ValueError(f"every, the steps between measurements, must be at least 1, got {every}")
    if target is not None:
        check_no_encoder(target, "training")
    manager, state = _begin(objective, texts, recipe, folder)
    test = jnp.asarray(held_out.tokens, jnp.int32), jnp.asarray(held_out.weights())
    given = jnp.asarray(texts.tokens), jnp.asarray(texts.weights())
    step, curve, out_of_time = int(state.step), _curve(folder, int(state.step)), False
    began, before = time.perf_counter(), curve[-1]["seconds"] if curve else 0.0
    line = bar(desc="training", total=recipe.steps, initial=step, unit="step")
    while step < recipe.steps and not out_of_time:
        count = min(STEPS, recipe.steps - step, every - step % every)
        rows = np.stack([rows_of(len(texts.tokens), recipe, step + i) for i in range(STEPS)])
        state, seen = train_steps(objective, target, state, given, rows, count, recipe=recipe)
        step += count
        line.update(count)
        out_of_time = time.perf_counter() - began > seconds
        if step % every == 0 or step == recipe.steps or out_of_time:
            figures = _figures("held_out", judge(objective, target, state.params, *test)) | _figures("train", seen)
            curve.append({"step": step, "seconds": round(before + time.perf_counter() - began, 1), **figures})
            progress(curve)
            _save(manager, state, curve)
    line.close()
    if manager is not None:
        manager.close()
    return state.params, curve


def _begin(objective: Objective, texts: Texts, recipe: Recipe, folder: str | Path | None) -> tuple[Any, TrainState]:
    """The manager of the folder's checkpoints, None without a folder, and the state that training starts from."""
    if folder is None:
        return None, start(objective, recipe)
    what = "checkpoints of another run (other texts, loss, shape, seed or recipe)"
    mark(Path(folder) / "run.txt", _identity(objective, texts, recipe), what)
    state, manager = start(objective, recipe), _manager(folder)
    return manager, state if manager.latest_step() is None else _restore(manager, state)


def _figures(prefix: str, figures: dict[str, jax.Array]) -> dict[str, Any]:
    """Figures as rounded Python numbers and lists, with a prefix before each name."""
    return {f"{prefix}_{name}": np.asarray(x, np.float64).round(4).tolist() for name, x in figures.items()}


def _identity(objective: Objective, texts: Texts, recipe: Recipe) -> str:
    """A digest of the objective, the texts and the recipe without its steps. Equal runs have equal digests."""
    digest = hashlib.sha256(repr((dataclasses.replace(recipe, steps=0), jax.tree.structure(objective))).encode())
    for array in (*jax.tree.leaves(objective), texts.tokens, texts.lengths, texts.own):
        digest.update(repr((array.shape, array.dtype)).encode() + np.asarray(array).tobytes())
    return digest.hexdigest()


def _manager(folder: str | Path):
    """The manager of a folder's checkpoints. It keeps the two newest."""
    import orbax.checkpoint as ocp  # slow to import

    return ocp.CheckpointManager(Path(folder).absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def _curve(folder: str | Path | None, step: int) -> list[dict]:
    """The curve of a folder up to a step. Later measurements belong to steps whose weights were not written."""
    file = None if folder is None else Path(folder) / CURVE
    if file is None or not file.is_file():
        return []
    return [line for line in json.loads(file.read_text("utf-8")) if line["step"] <= step]


def _save(manager, state: TrainState, curve: list[dict]) -> None:
    """Writes the curve and a checkpoint. Does nothing without a manager."""
    if manager is None:
        return
    import orbax.checkpoint as ocp

    file = Path(manager.directory) / CURVE
    file.with_suffix(".new").write_text(json.dumps(curve), "utf-8")
    file.with_suffix(".new").replace(file)  # whole or not at all, for a process that is killed here
    manager.save(int(state.step), args=ocp.args.StandardSave(state._asdict()))
    manager.wait_until_finished()  # the next step overwrites the state's buffers


def _restore(manager, like: TrainState) -> TrainState:
    """The newest checkpoint, with the shapes and dtypes of ``like``."""
    import orbax.checkpoint as ocp

    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
    return TrainState(**manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(shapes)))
