"""The page at ``/``: what it is as a file, and what it does in a browser, which is Chromium without a window."""

import json
import re
import shutil
import sys
from collections.abc import Iterator

import httpx
import page_server
import pytest
from openai_server import ask, service_of
from page_server import HTML, KEY
from server_process import running
from web_page import Page

from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.serving.http.auth import Keys

BROWSER = {"chromium": shutil.which("chromium"), "chromedriver": shutil.which("chromedriver")}
NO_FIGURE = "\N{EN DASH}"  # in a cell of the table


@pytest.fixture(scope="module")
def answer():
    service = service_of(page_server.model(), keys=Keys([KEY]))
    assert ask(service, "/v1/models").status_code == 401
    return ask(service, "/")


class TestFile:
    def test_page_needs_no_key_and_may_ask_this_server_alone(self, answer):
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert (policy.pop("default-src"), policy.pop("connect-src"), policy.pop("img-src")) == (
            "'none'",
            "'self'",
            "data:",
        )
        for name in ("script-src", "style-src"):
            assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy.pop(name))
        assert set(policy.values()) == {"'none'"}

    def test_page_needs_no_other_file_and_writes_no_html(self, answer):
        assert not re.search(r"https?://|url\(|@import|<(?:script|link)[^>]* src", answer.text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|localStorage", answer.text)
        assert '<meta name="viewport" content="width=device-width' in answer.text
        assert "prefers-color-scheme: dark" in answer.text

    def test_fields_have_the_names_of_openai_and_vllm(self, answer):
        labels = re.findall(r"<label[^>]*>(?:<span[^>]*>)?([^<:]*?)[ :]*<", answer.text)
        assert {
            *("Max tokens", "Temperature", "Top-p", "Seed", "Draft tokens (max_drafts)", "System prompt"),
            "Tools, as a JSON list",
        } <= set(labels)
        assert "Stop: one text per line" in answer.text


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    with running([sys.executable, "-m", "page_server"], tmp_path_factory.mktemp("page")) as (_, address):
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A browser without a window."""
    webdriver = pytest.importorskip("selenium.webdriver")
    for name, path in BROWSER.items():
        if path is None:
            pytest.skip(f"no {name} here: the page is not tried in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER["chromium"]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(BROWSER["chromedriver"]))
    try:
        yield found
    finally:
        found.quit()


@pytest.fixture
def page(browser, address) -> Page:
    page = Page(browser, address)
    page.enter_key()
    return page


def test_page_asks_for_the_api_key(browser, address):
    page = Page(browser, address)
    page.until(lambda: page.of("error").is_displayed())
    assert "The server asks for an API key" in page.of("error").text
    page.fill("key", "wrong\t")
    page.until(lambda: "or a wrong one" in page.of("error").text)
    page.enter_key()
    page.until(lambda: not page.of("error").is_displayed())
    assert page.of("how").text == "drafter: draft_model · verify: rejection · draft sampling: auto · draft tokens: 3"


def test_page_shades_accepted_drafts_and_draws_a_chart(page):
    page.complete(max_tokens="60", seed="7")
    assert HTML in page.answers()[0]
    assert {"draft", "correction", "bonus"} == set(page.sources())
    first, *others = page.shares()
    assert 1 > first > others[0] >= others[1] > 0
    assert page.of("with-tokens").text == "60"
    assert page.of("with-seed").text == "7"
    assert float(page.of("with-rate").text) > 0
    assert float(page.of("with-length").text) > 1.5
    assert re.fullmatch(r"\d+ ms", page.of("with-ttft").text)
    tokenizer = load_tokenizer(FAMILY / "target")
    assert tokenizer is not None
    assert page.of("with-context").text == f"{len(tokenizer.encode('What is a queue?')) + 60} of 16,384"
    assert page.log() == []
    # What the model wrote has stayed text.
    assert page.browser.title == "jspec"
    assert page.all(".log img") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sources_are_told_apart_without_colours(page, scheme):
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    script = """return ["draft", "correction", "bonus", "target"].map((source) => {
        const style = getComputedStyle(document.querySelector(`#legend .${source}`));
        return [style.backgroundColor, style.textDecorationLine + style.textDecorationStyle, style.color];
    })"""
    colours, lines, ink = zip(*page.run(script), strict=True)
    assert len(set(colours)) == len(set(lines)) == 4
    assert ink[0] == {"light": "rgb(28, 29, 31)", "dark": "rgb(232, 232, 234)"}[scheme]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_plain_text_stands_beside_the_shaded_text(page):
    page.complete(max_tokens="40", temperature="0")
    [text], seed = page.answers(), page.of("with-seed").text
    assert seed.isdigit()
    page.click("plain")
    assert page.answers() == [text, text]
    assert page.labels() == [
        f"completion · up to 3 draft tokens · seed {seed}",
        f"completion · without speculation · seed {seed}",
    ]
    assert ("draft" in page.sources(0), set(page.sources(1))) == (True, {"target"})
    assert page.request()["max_drafts"] == 0
    assert (page.of("without-seed").text, page.of("without-length").text) == (seed, "1.00")
    assert float(page.of("without-rate").text) > 0
    assert page.of("with-tokens").text == page.of("without-tokens").text == "40"
    assert not page.of("plain-note").is_displayed()
    assert page.of("caveats-title").text == 'How this is measured; plain decoding is faster than "without"'
    page.open("caveats")
    assert "they are made all the same" in page.of("plain-note").text


@pytest.mark.parametrize("mode", ["complete", "chat"])
def test_a_new_request_clears_the_comparison(page, mode):
    page.fill("max-tokens", "10")
    for count in (1, 2):
        page.complete() if mode == "complete" else page.chat("hello")
        assert len(page.answers()) == (1 if mode == "complete" else count)
        rows = ("rate", "ttft", "length", "tokens", "context", "seed")
        assert {page.of(f"without-{row}").text for row in rows} == {NO_FIGURE}
        page.click("plain")
        assert NO_FIGURE not in {page.of(f"without-{row}").text for row in rows}
        assert len(page.answers()) == (2 if mode == "complete" else count + 1)


def test_page_can_reduce_the_drafts_of_a_round(page):
    page.slide("drafts", 1)
    page.complete(max_tokens="40")
    first, *others = page.shares()
    assert first > 0
    assert others == [0, 0]
    assert 1 < float(page.of("with-length").text) <= 2
    assert page.request()["max_drafts"] == 1


def test_every_answer_of_a_chat_keeps_its_label_and_shading(page):
    page.fill("system", "Be brief.")
    for seed in ("1", "2"):  # at temperature 0, because a sampled text may begin with any token
        page.chat("<b>hello</b>", temperature="0", seed=seed, **{"max-tokens": "30"})
    assert page.texts("#chat-log .turn") == ["user<b>hello</b>"] * 2
    assert page.labels() == [f"assistant · up to 3 draft tokens · seed {seed}" for seed in (1, 2)]
    first, second = page.answers()
    assert first.startswith("<img")
    assert second
    assert {"draft", "correction", "bonus"} == set(page.sources(0)) == set(page.sources(1))
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>hello</b>"}
    assert page.request()["messages"] == [system, user, {"role": "assistant", "content": first}, user]
    page.of("new-chat").click()
    assert page.texts("#chat-log") == [""]
    page.chat("again")
    assert page.request()["messages"] == [system, {"role": "user", "content": "again"}]


def test_enter_sends_and_shift_enter_makes_a_new_line(page):
    from selenium.webdriver.common.keys import Keys as Key

    page.of("mode-chat").click()
    page.fill("max-tokens", "5")
    page.fill("prompt", "two")
    page.of("prompt").send_keys(Key.SHIFT, Key.ENTER)
    page.of("prompt").send_keys(Key.NULL, "lines")
    assert page.answers() == []
    page.of("prompt").send_keys(Key.ENTER)
    page.until(lambda: page.answers() and page.idle())
    assert page.request()["messages"] == [{"role": "user", "content": "two\nlines"}]
    assert page.of("prompt").get_property("value") == ""
    composer, log = page.of("composer").rect, page.of("chat-log").rect
    assert composer["y"] >= log["y"] + log["height"]


def test_page_says_how_an_answer_ended(page):
    page.complete(max_tokens="6", temperature="0")
    assert page.endings() == ["Cut: max tokens is 6 (finish_reason length)."]
    page.complete(max_tokens="60", stop=" src\\n\nonerror")
    assert page.request()["stop"] == [" src\n", "onerror"]
    assert page.endings() == ['Ended at the stop text "onerror" (finish_reason stop).']
    page.answer_with({"text": "a"})
    page.complete()
    assert page.endings() == ["Broken off."]
    page.answer_with({"text": "a", "finish_reason": "length"}, prompt_tokens=16_379)
    page.complete()
    assert page.endings() == ["Cut: the context of 16,384 tokens is full (finish_reason length)."]


def test_page_can_stop_a_request(page):
    page.of("mode-prompt").click()
    place = page.of("stop-button").rect
    page.fill("max-tokens", "16000")  # so many that the stop comes before the end on the slowest machine
    page.of("go").click()
    page.until(lambda: any(page.answers()))
    page.click("stop-button")
    assert page.of("stop-button").rect == place
    assert 0 < int(page.of("with-tokens").text) < 16_000
    assert not page.of("error").is_displayed()
    assert page.endings() == ["Stopped by you."]


def test_a_long_answer_leaves_time_for_other_things(page):
    """Its words are drawn in batches: drawn one by one, the last ones alone would take minutes."""
    sources = ["draft", "correction", "draft", "bonus"]
    page.answer_with(*({"text": "word ", "text_sources": [["word ", source]]} for source in sources * 4000))
    page.complete()
    assert page.answers() == ["word " * 16_000]
    assert page.sources() == sources * 4000


def test_page_shows_errors(page):
    page.chat("a question", **{"max-tokens": "0"})
    assert "max_tokens=0: expected" in page.of("error").text
    # There is no answer, so that the question is still to be asked.
    assert page.of("prompt").get_property("value") == "a question"
    assert page.texts("#chat-log") == [""]
    page.complete(max_tokens="0")
    assert "max_tokens=0: expected" in page.endings()[0]
    page.complete(max_tokens="3", seed="9223372036854775807")
    assert "Seed: expected a number, of at most 9007199254740991" in page.of("error").text
    page.complete(seed="9007199254740991")
    assert not page.of("error").is_displayed()
    assert page.answers() != [""]


def test_curl_command_repeats_the_request(page):
    page.complete(max_tokens="20", seed="5", temperature="0.5", top_p="0.9", prompt='it\'s $HOME "here"')
    words = page.curl()
    assert words[:2] == ["curl", "-N"]
    assert words[3:7] == ["-H", "Content-Type: application/json", "-H", "Authorization: Bearer $JSPEC_API_KEY"]
    assert (page.request()["prompt"], page.request()["top_p"]) == ('it\'s $HOME "here"', 0.9)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    answer = httpx.post(words[2], content=words[-1], headers=headers)
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == page.answers()[0]
    assert KEY not in " ".join(words)


def test_reasoning_and_calls_are_shown_as_such(page):
    arguments = '{"path": "<b>"}'
    call = {"index": 0, "id": "call-1", "function": {"name": "read_file", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": arguments}}
    name = '<tool_call>{"name": "read_file", "arguments": '
    sources = [[name, "draft"], ['{"path": ', "correction"], ['"<b>"}', "bonus"], ["}</tool_call>", "draft"]]
    page.answer_with(
        {"delta": {}, "text_sources": [["<think>", "draft"]], "token_sources": ["draft"]},
        {"delta": {"reasoning": "I look"}, "text_sources": [["I ", "draft"], ["look", "bonus"], ["</thi", "draft"]]},
        {"delta": {"content": "So"}, "text_sources": [["nk>", "correction"], ["So", "draft"]]},
        {"delta": {"tool_calls": [call]}, "text_sources": sources[:2]},
        {"delta": {"tool_calls": [rest]}, "text_sources": sources[2:], "finish_reason": "tool_calls"},
    )
    page.chat("Read it.", tools='[{"type": "function", "function": {"name": "read_file"}}]')
    assert page.request()["tools"][0]["function"]["name"] == "read_file"
    assert page.answers() == [f"ReasoningI lookSoCall: read_file{arguments}"]
    assert page.sources() == ["draft", "bonus", "draft", "correction", "bonus"]
    assert page.all(".reasoning")[0].value_of_css_property("opacity") == "0.7"
    page.all(".reasoning summary")[0].click()
    assert not page.all(".reasoning .text")[0].is_displayed()
    assert page.texts(".call b") == ["Call: read_file"]
    assert page.endings() == ["Ended with a call (finish_reason tool_calls)."]
    assert page.of("prompt-label").text == "Result of the call of read_file"
    page.chat("contents")
    called = {"id": "call-1", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
    assert page.request()["messages"] == [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": "So", "reasoning": "I look", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call-1", "content": "contents"},
    ]


def test_model_goes_on_when_all_calls_have_results(page):
    calls = [{"index": i, "id": f"call-{i}", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(2)]
    page.answer_with({"delta": {"tool_calls": calls}, "token_sources": ["target"], "finish_reason": "tool_calls"})
    page.chat("go")
    page.chat("first")
    assert len(page.answers()) == 1
    assert page.of("prompt-label").text == "Result of the call of f1"
    page.chat("second")
    assert len(page.answers()) == 2
    results = [(message["tool_call_id"], message["content"]) for message in page.request()["messages"][2:]]
    assert results == [("call-0", "first"), ("call-1", "second")]


def test_text_that_the_server_has_rewritten_is_not_shaded(page):
    page.answer_with({"delta": {"content": "ab"}, "text_sources": [["a-b", "draft"]], "token_sources": ["draft"]})
    page.chat("hello")
    assert (page.answers(), page.sources()) == (["ab"], [""])


def test_an_answer_can_be_copied(page):
    from selenium.webdriver.common.keys import Keys as Key

    page.complete(max_tokens="20")
    [copy] = page.all(".answer .copy")
    copy.click()
    page.until(lambda: copy.text == "Copied")
    page.of("prompt").clear()
    page.of("prompt").send_keys(Key.CONTROL, "v")
    page.of("prompt").send_keys(Key.NULL)
    assert page.of("prompt").get_property("value") == page.answers()[0]


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_on_a_phone_and_on_a_desk(browser, address, width):
    page = Page(browser, address, width)
    page.enter_key()
    page.complete(max_tokens="30")
    page.click("plain")
    assert page.run("return document.documentElement.scrollWidth") <= width
    shaded, plain = (answer.rect for answer in page.all(".answer"))
    if width == 390:
        assert plain["y"] >= shaded["y"] + shaded["height"]
    else:
        assert (plain["y"], plain["x"] >= shaded["x"] + shaded["width"]) == (shaded["y"], True)
