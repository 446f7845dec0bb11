"""The curve of a training run as a chart: the loss, and the acceptance by token of the draft."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.report.drawing import COLOURS, Chart

# The colours of the first tokens of a draft; later ones have the last.
PLACES = ("accepted", "correction", "bonus", "draft", "wide")


def chart(curve: Sequence[dict[str, Any]], title: str, place: str = "token") -> Chart:
    """Two panels over the steps: the loss of the step's batch and of held-out texts, and the held-out acceptance.

    Args:
      curve: what :func:`specjax.training.loop.train` returns; at least one measurement.
      title: the title.
      place: what the acceptance is measured at, in turn: the tokens of a draft, or the exits of a model.
    """
    steps = [line["step"] for line in curve]
    losses = {kind: [float(np.mean(line[f"{kind}_loss"])) for line in curve] for kind in ("train", "held_out")}
    alphas = np.array([np.atleast_1d(line["held_out_alpha"]) for line in curve])  # [measurements, places]

    def draw(axes) -> None:
        figure = axes.figure
        axes.remove()
        left, right = figure.subplots(1, 2)
        left.plot(steps, losses["train"], ".-", color=COLOURS["plain"], label="the batch of the step")
        left.plot(steps, losses["held_out"], ".-", color=COLOURS["accepted"], label="held-out texts")
        for number, alpha in enumerate(alphas.T, 1):
            colour = COLOURS[PLACES[min(number, len(PLACES)) - 1]]
            right.plot(steps, alpha, ".-", color=colour, label=f"{place} {number}")
        for panel, name in ((left, "loss"), (right, "acceptance rate, held-out")):
            panel.set_xlabel("step")
            panel.set_ylabel(name)
            panel.grid(axis="y")
            panel.legend()
        right.set_ylim(0, 1)
        figure.suptitle(title, fontsize=10)

    last = ", ".join(f"{alpha:.2f}" for alpha in alphas[-1])
    return Chart(
        "training",
        title,
        f"After {steps[-1]} steps the held-out loss is {losses['held_out'][-1]:.3f}, and the acceptance rate by "
        f"{place} is {last}.",
        ("step", "loss", "held-out loss", *(f"acceptance, {place} {i + 1}" for i in range(alphas.shape[1]))),
        [
            (step, f"{a:.4f}", f"{b:.4f}", *(f"{alpha:.4f}" for alpha in row))
            for step, a, b, row in zip(steps, *losses.values(), alphas, strict=True)
        ],
        (8.4, 3.4),
        draw,
    )
