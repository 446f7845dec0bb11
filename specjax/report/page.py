"""The report's page: one HTML file that loads nothing else, for light and dark mode and for wide and narrow screens."""

from html import escape
from itertools import chain
from typing import Any

from specjax.report import analysis
from specjax.report.charts import charts
from specjax.report.drawing import COLOURS, svg

LEGEND = {
    "accepted": "drafted and accepted",
    "correction": "correction: the target's own token, in place of a refused one",
    "bonus": "bonus: the target's own token, after a draft that was accepted whole",
    "plain": "plain: the target's own token, where nothing was drafted",
}

# The charts' colours on a dark background.
DARK = {
    "accepted": "#56b4e9",
    "correction": "#ff9a57",
    "bonus": "#35c79a",
    "plain": "#9aa4b2",
    "draft": "#e08cc8",
    "wide": "#d9b23d",
    "ink": "#e6e9ee",
    "faint": "#3a424d",
    "back": "#12161c",
}


def page(record: dict[str, Any]) -> str:
    """The HTML page of a checked record (``specjax.record``). This needs matplotlib."""
    settings, environment = record["settings"], record["environment"]
    drafter = settings["drafter"]
    details = ", ".join(f"{key} {value}" for key, value in drafter.items() if key != "name")
    subtitle = (
        f"{settings['model']} ({settings['dtype']}), drafter {drafter['name']}{details and f' ({details})'}, "
        f"verifier {settings['verifier']}, K = {settings['num_speculative_tokens']}, "
        f"temperature {settings['sampling'].get('temperature')}, on {device(environment)}"
    )
    figures = {chart.name: figure(chart) for chart in charts(record)}
    overall = [html for name, html in figures.items() if not name.startswith("rounds-")]
    body = [
        "<h1>A run of speculative decoding</h1>",
        f'<p class="quiet">{escape(subtitle)}</p>',
        f"<ul class=words>{''.join(f'<li>{escape(s)}</li>' for s in analysis.in_words(record))}</ul>",
        tiles(record),
        "<h2>The text, and the origin of each token</h2>",
        legend(record),
        *(completion(record, i, figures.get(f"rounds-{i}", "")) for i in range(len(record["completions"]))),
        f'<h2>Where the time went</h2>{ladder(record)}<div class="figures">{"".join(overall)}</div>' if overall else "",
        "<h2>Settings and machine</h2>",
        table(("", ""), flat({"settings": settings, "environment": environment, "timing": record["timing"]})),
    ]
    return TEMPLATE.format(style=style(), body="\n".join(body), script=SCRIPT)


def device(environment: dict) -> str:
    """The device in words. A CPU is named by its model, because its device kind is only "cpu"."""
    if environment["platform"] == "cpu":
        return f"{environment['cpu']}, {environment['cpu_count']} CPU cores"
    return environment["device"]


def tiles(record: dict) -> str:
    """The main figures of the run, each on a tile."""
    found, speed = analysis.totals(record), analysis.speedup(record)
    tiles = [
        (f"{record['timing']['tokens_per_second']:.1f}", "tokens per second"),
        (f"{speed.measured:.2f}" if speed else "not measured", "times the speed of plain decoding"),
        (f"{found.tokens_per_step:.2f}" if found.steps else "none", "tokens per target call"),
        (f"{found.alpha:.2f}" if found.judged else "none drafted", "alpha, the acceptance rate of judged tokens"),
        (f"{found.mean_acceptance_length:.2f}" if found.spec_steps else "none", "mean acceptance length"),
    ]
    return (
        '<dl class="tiles">' + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for value, name in tiles) + "</dl>"
    )


def legend(record: dict) -> str:
    """The origins of tokens with their looks and counts."""
    counts = {kind: sum(c["origins"].count(kind) for c in record["completions"]) for kind in LEGEND}
    entries = (
        f'<li><span class="token {kind}">token</span> {text} ({counts[kind]})</li>' for kind, text in LEGEND.items()
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def completion(record: dict, row: int, rounds_figure: str) -> str:
    """The section of one prompt: the prompt, the text token by token, and the rounds."""
    entry = record["completions"][row]
    several = len(record["completions"]) > 1
    spans = (
        f'<span class="token {origin}" data-about="{escape(about, quote=True)}" title="{escape(about, quote=True)}">'
        f"{shown}</span>"
        for shown, origin, about in tokens(entry)
    )
    rounds = entry.get("rounds")
    return f"""<section>
{f"<h3>Prompt {row + 1}</h3>" if several else ""}
<details><summary>Prompt, {entry["prompt_tokens"]} tokens</summary><pre>{escape(entry["prompt"])}</pre></details>
<p class="text" tabindex="0" role="group" aria-label="The text; arrow keys move by token">{"".join(spans)}</p>
<output class="about">Point at a token, or move to a token with the arrow keys, to read its story.</output>
{rounds_figure}
{f"<details><summary>All rounds, with q and p</summary>{rounds_table(rounds)}</details>" if rounds else ""}
</section>"""


def tokens(entry: dict) -> list[tuple[str, str, str]]:
    """HTML, origin and description of each token."""
    stories = list(chain.from_iterable(map(stories_of, entry["rounds"]))) if entry.get("rounds") else []
    found = []
    for i, (token, origin) in enumerate(zip(entry["tokens"], entry["origins"], strict=True)):
        text, story = stories[i] if stories else (None, LEGEND[origin])
        piece = entry["pieces"][i] if entry.get("pieces") else f"{token} "
        if piece:
            shown = escape(piece).replace("\n", '<span class="mark">\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}</span>\n')
        else:  # a special token, or a part of a character that is not its last part
            readable = text if text and "\N{REPLACEMENT CHARACTER}" not in text else f"#{token}"
            shown = f'<span class="mark">{escape(readable)}</span>'
        found.append((shown, origin, f"token {i + 1}, id {token}: {story}"))
    return found


def stories_of(entry: dict) -> list[tuple[str, str]]:
    """Text and story of each token that a round committed."""
    drafted = entry["drafted"]
    found = [
        (d["text"], f"drafted with q = {d['q']:.3f}, accepted with p = {d['p']:.3f}") for d in drafted if d["accepted"]
    ]
    if entry.get("token") is None:
        return found
    if entry["kind"] == "correction":
        refused = drafted[len(found)]
        q, p = refused["q"], refused["p"]
        story = f"correction of {refused['text']!r}, drafted with q = {q:.3f}, refused with p = {p:.3f}"
    elif entry["kind"] == "bonus":
        story = f"bonus after all {len(drafted)} drafted tokens were accepted"
    else:
        story = "plain step: nothing was drafted"
    return [*found, (entry["text"], story)]


def rounds_table(rounds: list[dict]) -> str:
    """The table of all rounds of a row."""
    rows = []
    for i, entry in enumerate(rounds):
        drafted = "; ".join(
            f"{d['text']!r} q {d['q']:.3f}, p {d['p']:.3f}, {'accepted' if d['accepted'] else 'not kept'}"
            for d in entry["drafted"]
        )
        own = f"{entry['kind']} {entry['text']!r}" if entry.get("token") is not None else "cut off by the end"
        rows.append((i + 1, entry["position"], drafted or "nothing", own))
    return table(("round", "position", "drafted", "the target's own token"), rows)


def ladder(record: dict) -> str:
    """The table from the predicted to the measured speedup."""
    speed = analysis.speedup(record)
    if speed is None:
        return (
            "<p>The record has no times of plain decoding to compare with. Run generate.py with --profile, --compare "
            "or both.</p>"
        )
    rows = [(name, f"{value:.2f}", why) for name, value, why in speed.ladder()]
    return (
        "<p>From the predicted speedup to the measured one. Each line takes one more thing into account.</p>"
        + table(("", "times the speed of plain decoding", "because"), rows)
    )


def figure(chart) -> str:
    """A chart with its title, its text alternative and its numbers."""
    wide = " wide" if chart.size[0] > 6 else ""
    return (
        f'<figure class="figure{wide}"><figcaption><strong>{escape(chart.title)}</strong></figcaption>'
        f'<div class="scroll" tabindex="0">{svg(chart)}</div>'
        f'<p class="quiet">{escape(chart.text)}</p>'
        f"<details><summary>Numbers</summary>{table(chart.header, chart.rows)}</details></figure>"
    )


def table(header: tuple, rows: list[tuple]) -> str:
    """An HTML table. The first cell of each row is the row's header; a header of empty names is left out."""
    head = (
        f"<thead><tr>{''.join(f'<th scope=col>{escape(str(c))}</th>' for c in header)}</tr></thead>"
        if any(header)
        else ""
    )
    lines = (
        "<tr>"
        + f"<th scope=row>{escape(str(row[0]))}</th>"
        + "".join(f"<td>{escape(str(c))}</td>" for c in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def flat(values: dict, prefix: str = "") -> list[tuple[str, str]]:
    """Nested dicts as rows of dotted names and values. Values of None, which are off, are left out."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{key}.")
        elif value is not None:
            rows.append((prefix + key, f"{value:.6g}" if isinstance(value, float) else str(value)))
    return rows


def style() -> str:
    """The style sheet, with the colours for light and dark mode."""

    def variables(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in colours.items())

    light = variables(COLOURS) + "--quiet:#57606a;--panel:#f6f8fa;"
    dark = variables(DARK) + "--quiet:#a3adb9;--panel:#1b2129;"
    return f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}" + STYLE


STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--back); }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.quiet { color: var(--quiet); font-size: .9rem; margin: .3rem 0; overflow-wrap: anywhere; }
.words { padding-left: 1.2rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .6rem; margin: 1rem 0; }
.tiles div { display: flex; flex-direction: column-reverse; justify-content: flex-end; background: var(--panel);
  border-radius: 6px; padding: .6rem .8rem; }
.tiles dt { color: var(--quiet); font-size: .85rem; line-height: 1.3; }
.tiles dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 2; padding: .6rem .8rem; border-radius: 6px;
  background: var(--panel); margin: .6rem 0 0; }
.token { color: var(--ink); border-bottom: 3px solid var(--plain); border-radius: 2px; }
.token.accepted { border-color: var(--accepted); background: color-mix(in srgb, var(--accepted) 22%, transparent); }
.token.correction { border-bottom: 3px dashed var(--correction);
  background: color-mix(in srgb, var(--correction) 20%, transparent); }
.token.bonus { border-bottom: 4px double var(--bonus); background: color-mix(in srgb, var(--bonus) 20%, transparent); }
.token.plain { border-bottom-style: dotted; }
.text .token:hover, .token.here { outline: 2px solid var(--ink); outline-offset: 1px; }
.mark { color: var(--quiet); font-size: .8em; }
.legend { list-style: none; padding: 0; margin: .3rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem;
  font-size: .9rem; }
.about { display: block; min-height: 1.6em; padding: .3rem .8rem; color: var(--quiet); font-size: .9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 1rem 1.5rem; }
.figure { margin: 1rem 0 0; min-width: 0; }
.figure.wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; max-width: 100%; }
svg { display: block; max-width: 100%; height: auto; }
.wide svg { min-width: 680px; }
svg text { font-family: system-ui, sans-serif !important; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--faint);
  font-weight: normal; overflow-wrap: break-word; }
th[scope=row] { min-width: 5.5em; }
thead th { color: var(--quiet); }
summary { cursor: pointer; font-size: .9rem; padding: .2rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); padding: .6rem .8rem;
  border-radius: 6px; }
"""

# Shows a token's story when the reader touches the token, points at the token, or moves to it with the arrow keys. The
# whole text is a single stop of the tab key.
SCRIPT = """
for (const section of document.querySelectorAll("section")) {
  const tokens = [...section.querySelectorAll(".text .token")], about = section.querySelector(".about");
  let here = -1;
  const show = i => {
    if (here >= 0) tokens[here].classList.remove("here");
    here = i;
    tokens[i].classList.add("here");
    about.textContent = tokens[i].dataset.about;
  };
  section.querySelector(".text").addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step || !tokens.length) return;
    event.preventDefault();
    show(Math.min(Math.max(here + step, 0), tokens.length - 1));
  });
  tokens.forEach((token, i) => {
    token.addEventListener("click", () => show(i));
    token.addEventListener("mouseenter", () => show(i));
  });
}
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>A run of speculative decoding</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""
