"""The report's charts, each from the record of a run."""

from specjax.report import analysis
from specjax.report.drawing import COLOURS, Chart, whole_numbers

SHOWN = 200  # the largest number of rounds in a chart that shows rounds one by one


def charts(record: dict) -> list[Chart]:
    """All charts that the record has data for."""
    drafted = analysis.totals(record).drafted
    timed = record["timing"].get("calls") and analysis.speedup(record)
    found = [_time_line(record), _costs(record)] if timed else []
    found += [_positions(record), _histogram(record)] if drafted else []
    for i, completion in enumerate(record["completions"]):
        if drafted and completion["tokens"]:
            found.append(_rounds(record, i))
    return found


def _time_line(record: dict) -> Chart:
    """The rounds of this run on a time line, beside plain decoding: as in Leviathan et al. 2023, figure 5."""
    calls, speed = record["timing"]["calls"], analysis.speedup(record)
    assert speed is not None
    rounds = analysis.widths(record)
    shown = rounds[:SHOWN]
    kept = max(completion_tokens(record, len(shown)))
    whole = len(shown) == len(rounds)
    laid = sum(calls["draft"] + calls["verify"][str(width)] for width in shown)
    rows = [("plain decoding", kept * calls["plain_step"]), ("rounds, from their parts", laid)]
    rows += [("rounds, measured as a whole", speed.seconds)] if whole else []

    def draw(axes) -> None:
        plain, draft, verify, clock = [], [], [], 0.0
        for i in range(kept):
            plain.append((i * calls["plain_step"], calls["plain_step"]))
        for width in shown:
            draft.append((clock, calls["draft"]))
            clock += calls["draft"]
            verify.append((clock, calls["verify"][str(width)]))
            clock += calls["verify"][str(width)]
        edge = dict(edgecolor=COLOURS["back"], linewidth=0.4)
        lanes = len(rows) - 1
        axes.broken_barh(plain, (lanes - 0.35, 0.7), facecolor=COLOURS["plain"], label="plain step", **edge)
        axes.broken_barh(verify, (lanes - 1.35, 0.7), facecolor=COLOURS["accepted"], label="verification", **edge)
        axes.broken_barh(draft, (lanes - 1.35, 0.7), facecolor=COLOURS["draft"], label="drafting")
        if whole:
            axes.barh(0, speed.seconds, 0.7, facecolor=COLOURS["faint"], edgecolor=COLOURS["ink"], label="measured")
        axes.set_yticks(range(len(rows)), [name.replace(", ", ",\n") for name, _ in rows][::-1])
        axes.set_xlabel("time (s)")
        axes.set_xlim(0)
        axes.tick_params(axis="y", length=0)
        axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)

    part = "" if whole else f" The chart shows the first {SHOWN} of {len(rounds)} rounds."
    text = (
        f"{len(shown)} rounds, laid end to end, beside the {kept} plain steps that would give the same tokens: "
        f"{laid:.3g} s against {kept * calls['plain_step']:.3g} s. A plain step takes {ms(calls['plain_step'])}, "
        f"drafting takes {ms(calls['draft'])}, and a verification takes "
        + ", ".join(
            f"{ms(seconds)} for {width} token{'s'[: width != '1']}" for width, seconds in calls["verify"].items()
        )
        + f". Each time is the median of repetitions in the same process, and not the time of the single call.{part}"
    )
    return Chart("time-line", "Draft and verify calls against plain decoding", text, ("", "seconds"), [
        (name, f"{seconds:.3f}") for name, seconds in rows
    ], (9.6, 2.5), draw)  # fmt: skip


def completion_tokens(record: dict, rounds: int) -> list[int]:
    """The number of new tokens that each row has after ``rounds`` rounds."""
    return [
        min(m.completion_tokens, sum(m.per_step_accepted[:rounds]) + len(m.per_step_accepted[:rounds]))
        for m in analysis.all_metrics(record)
    ]


def ms(seconds: float) -> str:
    """Seconds as milliseconds with three digits."""
    return f"{seconds * 1e3:.3g} ms"


def _costs(record: dict) -> Chart:
    """The time of a new token, by part, beside a plain step."""
    speed = analysis.speedup(record)
    assert speed is not None
    one = speed.rounds * speed.plain_step
    parts = [
        ("one plain step a round", one, "accepted"),
        ("drafting", speed.drafting, "draft"),
        ("verifying more than one token", speed.widening, "wide"),
        ("the rest", speed.rest, "faint"),
    ]
    per_token = {name: seconds / speed.steps for name, seconds, _ in parts}

    def draw(axes) -> None:
        axes.barh(1, speed.plain_step * 1e3, 0.55, color=COLOURS["plain"])
        left = 0.0
        for name, _, colour in parts:
            width = max(per_token[name], 0.0) * 1e3
            edge = COLOURS["ink"] if colour == "faint" else COLOURS["back"]
            axes.barh(0, width, 0.55, left=left, color=COLOURS[colour], edgecolor=edge, linewidth=0.6, label=name)
            left += width
        axes.set_yticks([1, 0], ["plain", "speculative"])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.5, 1.5)
        axes.set_xlabel("time of a token (ms)")
        axes.legend(loc="lower left", bbox_to_anchor=(-0.22, 1), ncols=1, borderaxespad=0.2)

    return Chart(
        "costs",
        "Where the time of a token went",
        f"A plain step takes {ms(speed.plain_step)}. In this run a token took {ms(speed.seconds / speed.steps)}: "
        + ", ".join(f"{name} {ms(seconds)}" for name, seconds in per_token.items())
        + ".",
        ("", "ms per token", "share of decoding"),
        [(name, f"{per_token[name] * 1e3:.2f}", f"{seconds / speed.seconds:.1%}") for name, seconds, _ in parts],
        (4.4, 3.2),
        draw,
    )


def _positions(record: dict) -> Chart:
    """The share of accepted tokens at each position in the draft."""
    found, steps = analysis.positions(record), analysis.totals(record).spec_steps
    alpha = analysis.totals(record).alpha or 0.0
    place = range(1, len(found) + 1)
    reached = [accepted / steps for _, accepted in found]

    def draw(axes) -> None:
        axes.bar(place, reached, 0.7, color=COLOURS["accepted"], label="accepted")
        given = [(i, accepted / judged) for i, (judged, accepted) in zip(place, found, strict=True) if judged]
        axes.plot(*zip(*given, strict=True), "D", color=COLOURS["correction"], label="accepted, if all before it were")
        powers = [alpha**i for i in place]
        axes.plot(
            place, powers, "--", color=COLOURS["ink"], linewidth=1.2, label=f"alpha to the power of i, {alpha:.2f}"
        )
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("position i in the draft")
        axes.set_ylabel("share of speculative steps")
        axes.grid(axis="y")
        whole_numbers(axes.xaxis)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.15, 1), borderaxespad=0.2)

    return Chart(
        "positions",
        "Acceptance by position",
        f"Of {steps} speculative steps, the first drafted token was accepted in {reached[0]:.0%} and the last, number "
        f"{len(found)}, in {reached[-1]:.0%}. If every token were accepted with the same probability {alpha:.2f}, "
        "independently of the others, the bars would follow the dashed line.",
        ("position", "accepted", "judged", "share of speculative steps", "share of judged"),
        [
            (i, accepted, judged, f"{accepted / steps:.3f}", f"{accepted / judged:.3f}" if judged else "none judged")
            for i, (judged, accepted) in zip(place, found, strict=True)
        ],
        (4.4, 3.4),
        draw,
    )


def _histogram(record: dict) -> Chart:
    """How many target calls accepted each number of drafted tokens."""
    plain, counts = analysis.histogram(record)
    size = len(counts) - 1

    def draw(axes) -> None:
        axes.bar(range(size + 1), counts, 0.7, color=COLOURS["accepted"], label="with a draft")
        if plain:
            axes.bar(
                0,
                plain,
                0.7,
                bottom=counts[0],
                color=COLOURS["plain"],
                hatch="//",
                edgecolor=COLOURS["back"],
                label="plain",
            )
        axes.set_xlabel("drafted tokens accepted")
        axes.set_ylabel("target calls")
        axes.grid(axis="y")
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.15, 1), ncols=2, borderaxespad=0.2)

    return Chart(
        "histogram",
        "Accepted lengths",
        f"Of {plain + sum(counts)} target calls, {plain} had no draft, {counts[0]} had a draft and accepted nothing of "
        f"it, and {counts[-1]} accepted all {size} tokens.",
        ("drafted tokens accepted", "calls with a draft", "plain calls"),
        [(i, count, plain if i == 0 else 0) for i, count in enumerate(counts)],
        (4.4, 3.4),
        draw,
    )


def _rounds(record: dict, row: int) -> Chart:
    """The drafted and accepted tokens of each round of one row."""
    completion = record["completions"][row]
    metrics = analysis.all_metrics(record)[row]
    drafted, accepted = metrics.per_step_drafted[:SHOWN], metrics.per_step_accepted[:SHOWN]
    entropy = [entry.get("entropy") for entry in completion.get("rounds") or []][:SHOWN]
    with_entropy = any(value is not None for value in entropy)

    def draw(axes) -> None:
        place = range(1, len(drafted) + 1)
        axes.bar(
            place, drafted, 0.9, color=COLOURS["faint"], edgecolor=COLOURS["plain"], linewidth=0.5, label="drafted"
        )
        axes.bar(place, accepted, 0.9, color=COLOURS["accepted"], label="accepted")
        axes.set_xlabel("round")
        axes.set_ylabel("tokens")
        axes.set_xlim(0.3, len(drafted) + 0.7)
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
        lines = axes.get_legend_handles_labels()
        if with_entropy:
            right = axes.twinx()
            points = [(i, value) for i, value in zip(place, entropy, strict=True) if value is not None]
            right.plot(*zip(*points, strict=True), ".-", color=COLOURS["correction"], label="entropy (right)")
            right.set_ylabel("draft's entropy over log V")
            right.set_ylim(0)
            lines = tuple(a + b for a, b in zip(lines, right.get_legend_handles_labels(), strict=True))
        axes.legend(*lines, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)

    empty = sum(d == 0 for d in drafted)
    more = metrics.num_steps > SHOWN
    part = f" The chart shows the first {SHOWN} of {metrics.num_steps} rounds." if more else ""
    return Chart(
        f"rounds-{row}",
        "Drafted and accepted tokens, round by round",
        f"{len(drafted)} rounds, {empty} of them without a draft. A round drafted at most {max(drafted)} tokens.{part}",
        ("round", "drafted", "accepted", *(["entropy"] if with_entropy else [])),
        [
            (i + 1, drafted[i], accepted[i], *([entropy[i]] if with_entropy else []))
            for i in range(len(drafted))
        ],
        (9.6, 2.4),
        draw,
    )  # fmt: skip
