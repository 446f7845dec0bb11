"""The report: its figures against hand counts, its page as a parser and a browser see it, and its refusals."""

import copy
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import zip_longest

import pytest
from commands import script
from recorded_runs import DRAFT, SETTINGS, SIZE, Letters, streamed

from specjax import report
from specjax.drafters import TreeModel
from specjax.drafting import theory
from specjax.report import analysis, record

CALLS = {"plain_step": 0.1, "draft": 0.02, "verify": {"4": 0.15}}


def recorded(prompts=("a", "bcd"), timing=None, **options):
    events = streamed(prompts, **options)
    result = events.result()
    times = {"prefill": 0.5, "decode": 2.0, "tokens_per_second": sum(map(len, result.tokens)) / 2, "streamed": True}
    return record.run(result, prompts, SETTINGS, {**times, **(timing or {})}, Letters(), events.trace)


@pytest.fixture(scope="module")
def whole():
    return recorded(timing={"calls": CALLS})


class Page(HTMLParser):
    """Checks nesting, and collects text, tags and attributes."""

    VOID = {"meta", "br", "path", "use", "rect"}

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag, **attributes):
        return [a for t, a in self.tags if t == tag and all(a.get(k) == v for k, v in attributes.items())]


def test_figures_of_a_run_are_those_of_a_count_by_hand(whole):
    # Both rows: each round accepts one of the draft and corrects the next.
    found = analysis.totals(whole)
    drafted = [m.per_step_drafted for m in analysis.all_metrics(whole)]
    assert found.tokens == 24 and found.drafted == sum(map(sum, drafted))
    assert [accepted for _, accepted in analysis.positions(whole)] == [found.accepted, 0, 0]
    assert sum(judged for judged, _ in analysis.positions(whole)) == found.judged
    plain, counts = analysis.histogram(whole)
    assert plain + sum(counts) == found.steps and counts[2:] == [0, 0]


def test_the_ladder_leads_from_theory_to_the_measurement(whole):
    speed = report.speedup(whole)
    assert speed.rounds * speed.plain_step + speed.drafting + speed.widening + speed.rest == pytest.approx(2.0)
    assert speed.drafting == pytest.approx(speed.rounds * 0.02) and speed.widening == pytest.approx(speed.rounds * 0.05)
    assert speed.measured == pytest.approx(12 * 0.1 / 2.0)
    names = [name for name, _, _ in speed.ladder()]
    values = {name: value for name, value, _ in speed.ladder()}
    alpha = analysis.totals(whole).alpha
    assert values["theorem 3.8"] == pytest.approx(theory.walltime_factor(alpha, SIZE, 0.02 / SIZE / 0.1))
    assert values["tokens a round as they were"] == pytest.approx(12 * 0.1 / (speed.rounds * 0.12))
    assert values["verification as wide as it was"] == pytest.approx(12 * 0.1 / (speed.rounds * 0.17))
    assert names[0] == "tokens a round, equation 1" and names[-1] == "measured"
    rows = [m.per_step_drafted for m in analysis.all_metrics(whole)]
    drafting = sum(max(pair) > 0 for pair in zip_longest(*rows, fillvalue=0))
    assert 0 < drafting < speed.rounds, "the limit leaves no room for a draft in the last round"
    covered = 1 + drafting / speed.rounds * (theory.expected_tokens(alpha, SIZE) - 1)
    assert values["rounds without a draft"] == pytest.approx(covered / 1.2)


def test_with_compare_alone_only_the_ratio_is_known(whole):
    plain = {"prefill": 0.5, "decode": 1.0, "tokens_per_second": 24.0}
    found = recorded(timing={"plain": plain, "ratio": 0.5})
    assert report.speedup(found).ladder()[0][:2] == ("measured", 0.5)
    assert [chart.name for chart in report.charts(found)] == ["positions", "histogram", "rounds-0", "rounds-1"]
    assert report.speedup(recorded()) is None


def test_the_page_is_whole_and_fetches_nothing(whole):
    html = report.page(whole)
    page = Page(html)
    for name in ("src", "href", "xlink:href", "action", "data"):
        assert all(a[name].startswith("#") for _, a in page.tags if name in a), name
    assert "@import" not in html and not re.search(r"url\((?!#)", html) and "fetch(" not in html
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', html))
    assert used and used <= set(ids)
    pictures = page.all("svg")
    assert len(pictures) == len(report.charts(whole)) == 6
    for picture in pictures:
        assert picture["role"] == "img" and set(picture["aria-labelledby"].split()) <= set(ids)
    assert not re.search(r"#[0-9a-f]{6}", "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))), (
        "not a theme's colour"
    )


def test_every_token_is_there_with_its_origin_and_story(whole):
    page = Page(report.page(whole))
    for i, completion in enumerate(whole["completions"]):
        spans = [a for a in page.all("span") if a.get("data-about")][12 * i : 12 * (i + 1)]
        assert [a["class"].split()[1] for a in spans] == completion["origins"]
    first, second = [a["data-about"] for a in page.all("span") if a.get("data-about")][:2]
    assert "drafted with q = " in first and "accepted with p = " in first
    assert "correction of 'd'" in second


def test_the_rounds_of_trees_have_a_page():
    tree = TreeModel(DRAFT.lm, (2, 2, 1))
    found = recorded(drafter=tree, timing={"calls": {**CALLS, "verify": {"11": 0.15}}})
    assert sum(analysis.histogram(found)[1][1:]) > 0
    assert Page(report.page(found)).all("svg")


def test_text_is_escaped(whole):
    nasty = copy.deepcopy(whole)
    nasty["completions"][0]["prompt"] = "<script>alert(1)</script>"
    nasty["settings"]["model"] = "<b>&"
    html = report.page(nasty)
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html and "&lt;b&gt;&amp;" in html


def test_entropy_is_shown_where_rounds_have_it(whole):
    found = copy.deepcopy(whole)
    found["completions"][0]["rounds"][1]["entropy"] = 0.75
    with_it, without = (chart for chart in report.charts(found) if chart.name.startswith("rounds-"))
    assert with_it.header[-1] == "entropy" and with_it.rows[1][-1] == 0.75 and without.header[-1] == "accepted"
    assert "draft's entropy over log V" in report.page(found)


def test_plain_decoding_and_nothing_at_all_have_a_page():
    settings = {**SETTINGS, "num_speculative_tokens": 0, "drafter": {"name": "none"}}
    metrics = {"completion_tokens": 2, "per_step_drafted": [0, 0], "per_step_accepted": [0, 0]}
    base = recorded(max_new_tokens=0)
    assert "Nothing was generated." in report.page(base)
    base["settings"] = settings
    base["completions"] = [
        {**base["completions"][0], "text": "ab", "tokens": [0, 1], "pieces": ["a", "b"], "origins": ["plain"] * 2}
    ]
    base["completions"][0]["metrics"] = {**metrics, "num_speculative_tokens": 0}
    base["completions"][0]["rounds"] = None
    base["timing"] |= {"decode": 1.0, "tokens_per_second": 2.0}
    record.check(base)
    assert "every call was a plain step" in report.page(base)


def test_the_script_writes_page_and_pictures(capsys, tmp_path, whole):
    (tmp_path / "run.json").write_text(json.dumps(whole))
    main = script("report").main
    assert main([str(tmp_path / "run.json"), "--png", str(tmp_path / "pictures")]) == 0
    assert "<!DOCTYPE html>" in (tmp_path / "run.html").read_text()
    pictures = sorted((tmp_path / "pictures").glob("*.png"))
    assert len(pictures) == 6 and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert len(capsys.readouterr().out.splitlines()) == 7


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "No such file"),
        ("{", "not a JSON file"),
        ("{}", '"format" must be'),
        ('{"format": "specjax-run"}', "version"),
    ],
)
def test_a_bad_file_is_one_sentence_and_exit_code_2(capsys, tmp_path, text, says):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    assert script("report").main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and says in err and err.count("\n") == 1
    assert not (tmp_path / "run.html").exists()


@pytest.mark.skipif(not shutil.which("chromium"), reason="no headless browser (Debian's chromium)")
@pytest.mark.parametrize("scheme, width", [("light", 1100), ("dark", 380)])
def test_in_a_browser(tmp_path, whole, scheme, width):
    """Nothing sticks out of the page, colours follow the scheme, arrow keys tell the tokens' stories."""
    (tmp_path / "page.html").write_text(report.page(whole) + PROBE)
    (tmp_path / "frame.html").write_text(f'<iframe src="page.html" width="{width}" height="900"></iframe>')
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={tmp_path}/profile --enable-logging=stderr"
    flags += f" --blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1} --dump-dom"
    done = subprocess.run(
        ["chromium", *flags.split(), f"file://{tmp_path}/frame.html"], capture_output=True, text=True, timeout=60
    )
    said = re.search(r"PROBE (\{.*?\})\W", done.stderr)
    assert said, done.stderr[-2000:]
    found = json.loads(said[1].replace("'", '"'))
    assert found["wide"] <= width
    assert found["dark"] == (scheme == "dark")
    assert found["story"].startswith("token 2, ")


# Quotes are single so that the console's own escaping leaves them alone.
PROBE = """<script>
const text = document.querySelector(".text"), press = key => text.dispatchEvent(new KeyboardEvent("keydown", {key}));
press("ArrowRight"); press("ArrowRight");
const back = getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number);
console.log("PROBE " + JSON.stringify({
  wide: document.documentElement.scrollWidth, dark: back[0] < 128,
  story: document.querySelector(".about").textContent.slice(0, 12),
}).replaceAll('"', "'"));
</script>"""
