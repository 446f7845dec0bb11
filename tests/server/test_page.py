"""The page at /: what the server sends, and what a person sees in a browser."""

import asyncio
import re
import time

import pytest
from browser import CHROMIUM, SHIFT, browser
from served import CAPACITY, LM, SIZE, TOKENIZER, alone, client, real_server, running

import specjax
from specjax import testing
from specjax.server import page
from specjax.server.service import Service

DRAFTER = specjax.drafters.DraftModel(testing.noisy_twin(LM, 0.02))
IDLE = "!document.querySelector('#send').disabled"


def plain(first):
    made = specjax.Engine(first.lm, None, slots=first.limits.slots, capacity=first.capacity, prefill_chunk=64)
    made.warmup = lambda: None
    return made


def test_the_page_loads_nothing_else_and_its_policy_forbids_it():
    async def whole():
        async with running(ready=False, keys=["k"]) as app, client(app) as one:
            return await one.get("/")

    answer = asyncio.run(whole())
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == page.FILE.read_text()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert not re.findall(r"https?:|//\w+\.|@import|url\(|\bsrc=|innerHTML|style=", answer.text)


def test_the_plain_model_is_a_second_engine_over_the_same_weights():
    async def whole():
        async with running(others={"none": plain}) as app, client(app) as one:
            names = [entry["id"] for entry in (await one.get("/v1/models")).json()["data"]]
            assert names == ["tiny", "tiny:none"]
            body = dict(prompt="abcabcabc" * 4, temperature=0, max_tokens=30, ignore_eos=True)
            drafted = (await one.post("/v1/completions", json=body)).json()
            alone = (await one.post("/v1/completions", json={**body, "model": "tiny:none"})).json()
            assert (drafted["model"], alone["model"]) == ("tiny", "tiny:none")
            assert drafted["specjax"]["drafted"] > 0 == alone["specjax"]["drafted"]
            assert drafted["choices"][0]["text"] == alone["choices"][0]["text"]
            service = app.state.service
            assert service.model("tiny:none")[1].lm is service.engine.lm is LM

    asyncio.run(whole())


def ask(page, text):
    page.value("document.querySelector('#question').focus()")
    page.type(text)
    page.press("Enter")


def shown(page, answer=1):
    """The text of one answer of the last question, and its origins in the order of the text."""
    tokens = f"[...document.querySelectorAll('.turn:last-child .answer:nth-child({answer}) .token')]"
    return page.value(f"{tokens}.map(t => t.textContent).join('')"), page.value(f"{tokens}.map(t => t.classList[1])")


def settings(page, **values):
    for name, value in values.items():
        page.value(f"document.querySelector('#{name}').value = '{value}'")


class Slowed:
    """Makes an engine. While ``pause`` is above 0, each of its rounds takes that many seconds more."""

    def __init__(self):
        self.pause = 0

    def __call__(self):
        made = specjax.Engine(LM, DRAFTER, num_speculative_tokens=SIZE, slots=1, capacity=CAPACITY, prefill_chunk=64)
        made.warmup = lambda: None  # the test compiles what it needs
        dispatch = made._loop._dispatch
        made._loop._dispatch = lambda: (time.sleep(self.pause), dispatch())
        return made


@pytest.mark.skipif(not CHROMIUM, reason="no headless browser (Debian's chromium)")
def test_a_person_chats_stops_replays_and_compares(tmp_path):
    """One browser and one server for all, because both take seconds to start."""
    slowed = Slowed()
    service = Service(slowed, ["tiny"], ["secret"], others={"none": plain})
    with real_server(service) as address, browser(tmp_path) as page:
        page.open(address)
        page.until("document.querySelector('#status')?.textContent.includes('API key')")
        page.value("document.querySelector('#key').focus()")
        page.type("secret")
        page.press("Tab")
        page.until("document.querySelector('#status').textContent === 'Ready.'")
        assert "tiny" in page.text("#model")
        settings(page, temperature=0.3, max_tokens=60, seed=4)
        answers_and_replays(page)
        report = page.value("document.querySelector('.report').href")
        compares(page)
        slowed.pause = 0.1
        stops(page, service)
        slowed.pause = 0
        tells_errors(page)
        wrong = [said for said in page.complaints if said.get("entry", {}).get("level") not in ("verbose", "info")]
        assert all("40" in said["entry"]["text"] for said in wrong), wrong  # the refusals that the test asks for
        fits_narrow_and_dark_windows(page, address)
        reads_the_report(page, report)


def answers_and_replays(page):
    question = "<b>abc</b>" * 4 + "\nabc"
    page.value("document.querySelector('#question').focus()")
    page.type("<b>abc</b>" * 4)
    page.press("Enter", SHIFT)
    page.type("abc")
    page.press("Enter")
    page.until(IDLE + " && document.querySelector('.text').textContent")
    assert page.text("h2") == question and page.value("document.querySelector('b')") is None
    ids = TOKENIZER.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    expected = alone(ids, drafter=DRAFTER, temperature=0.3, top_p=0.95, max_new_tokens=60, seed=4)
    text, origins = shown(page)
    assert text == expected.texts[0]
    assert {"accepted", "correction", "bonus"} <= set(origins) <= {"accepted", "correction", "bonus", "plain"}
    looks = page.value(
        "['accepted', 'correction', 'bonus', 'plain'].map(kind => getComputedStyle(document.querySelector("
        "`#legend .${kind}`))).map(style => style.borderBottomStyle + style.borderBottomColor)"
    )
    assert len(set(looks)) == 4 == len({look.split("rgb")[0] for look in looks}), "each origin has a line of its own"
    metrics = expected.metrics[0]
    for part in (f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted", "tokens/s", "seed 4"):
        assert part in page.text(".figures").replace("\n", " ")
    page.value("document.querySelector('.replay').click()")
    page.until(IDLE)
    assert shown(page, 2) == (text, origins) and page.text(".verdict") == "Replayed. The texts are the same."


def reads_the_report(page, address):
    """The report opens by its link alone, without a key, and its policy lets its own styles and script run."""
    complaints = len(page.complaints)
    page.open(address)
    page.until("document.querySelector('h1')?.textContent === 'A run of speculative decoding'")
    assert page.value("document.querySelectorAll('svg').length") > 0 and "60" in page.text(".words")
    assert page.value("getComputedStyle(document.body).maxWidth") != "none" and page.complaints[complaints:] == []


def compares(page):
    settings(page, temperature=0, drafter="tiny:none")
    page.value("document.querySelector('#forget').click()")
    ask(page, "abcabcabc")
    page.until(IDLE)
    assert set(shown(page)[1]) == {"plain"}, "the chosen drafter drafts nothing"
    settings(page, drafter="tiny")
    page.value("document.querySelector('#forget').click()")
    page.value("document.querySelector('#compare').click()")
    ask(page, "abcabcabc")
    page.until(IDLE)
    (drafted, origins), (text, plain_origins) = shown(page), shown(page, 2)
    assert drafted == text and set(plain_origins) == {"plain"} != set(origins)
    verdict = page.text(".turn:last-child .verdict")
    assert re.match(r"With speculation \d+\.\d\d times the tokens/s\. The texts are the same\.", verdict)
    page.value("document.querySelector('#compare').click()")


def stops(page, service):
    settings(page, max_tokens=90, seed="")
    for stop in (lambda: page.press("Escape"), lambda: page.value("document.querySelector('#stop').click()")):
        page.value("document.querySelector('#forget').click()")
        ask(page, "abcabc")
        page.until("document.querySelectorAll('.text .token').length > 3")
        assert page.value("document.querySelector('#send').disabled") and "tokens a round" in page.text(".figures")
        stop()
        page.until(IDLE)
        assert page.text("#status") == "Stopped." == page.text(".note")
        assert 3 < len(shown(page)[0]) < 90
        while service.engine.stats().running:
            time.sleep(0.01)
    page.value("document.querySelector('.replay').click()")
    page.until(IDLE)
    assert page.text(".verdict") == "Replayed. The texts are the same as far as both go."
    assert re.search(r"seed\s+\d+", page.text(".figures"))


def tells_errors(page):
    settings(page, max_tokens=9999)
    ask(page, "abc")
    page.until(IDLE)
    assert "maximum context length" in page.text(".turn:last-child .note.wrong")
    settings(page, max_tokens=5, key="wrong")
    ask(page, "abc")
    page.until(IDLE)
    assert "API key" in page.text(".turn:last-child .note.wrong") and "API key" in page.text("#status")
    settings(page, key="secret")
    page.value("document.querySelector('.turn:last-child .replay').click()")
    page.until(IDLE)
    assert shown(page)[0] and page.text("#status") == "Done."
    settings(page, top_p=7)
    ask(page, "more")
    assert page.value("document.querySelector('#question').value") == "more", "a wrong setting sends nothing"


def fits_narrow_and_dark_windows(page, address):
    for width, dark in ((1280, False), (360, True)):
        page.open(address, width, 700, dark)
        page.until("document.querySelector('#status')?.textContent.includes('API key')")
        assert page.value("document.documentElement.scrollWidth") <= width
        back = page.value("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
        assert (back[0] < 128) == dark
