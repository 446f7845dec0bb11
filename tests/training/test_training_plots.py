"""The drawn curve of a training run."""

from specjax.report import drawing
from specjax.training import plots

CURVE = [
    {"step": 10, "train_loss": [3.0, 4.0], "held_out_loss": [3.2, 4.2], "held_out_alpha": [0.3, 0.2]},
    {"step": 20, "train_loss": [1.0, 2.0], "held_out_loss": [1.5, 2.5], "held_out_alpha": [0.6, 0.5]},
]


def test_the_chart_of_a_run_has_all_places_of_a_draft(tmp_path):
    chart = plots.chart(CURVE, "a head")
    assert chart.rows == [
        (10, "3.5000", "3.7000", "0.3000", "0.2000"), (20, "1.5000", "2.0000", "0.6000", "0.5000"),
    ]  # fmt: skip
    assert "held-out loss is 2.000" in chart.text and "0.60, 0.50" in chart.text
    drawing.svg_file(chart, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "var(--" not in text, "a file stands alone"
    assert all(label in text for label in ("token 1", "token 2", "held-out", "acceptance rate", "a head"))


def test_a_drafter_of_one_place_is_drawn_too():
    curve = [{"step": 5, "train_loss": 1.0, "held_out_loss": 2.0, "held_out_alpha": 0.4}]
    assert plots.chart(curve, "a draft").rows == [(5, "1.0000", "2.0000", "0.4000")]
