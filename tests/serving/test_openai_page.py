"""The page at ``/``: what it is as a file, and what it does in a browser, which is Chromium without a window."""

import re
import shutil
import sys
from collections.abc import Iterator

import page_server
import pytest
from openai_server import ask, service_of
from page_server import HTML, KEY
from test_openai_process import running

from jspec.serving.openai.auth import Keys

BROWSER = {"chromium": shutil.which("chromium"), "chromedriver": shutil.which("chromedriver")}
SECONDS = 60  # that anything may take


@pytest.fixture(scope="module")
def answer():
    service = service_of(page_server.model(), keys=Keys([KEY]))
    assert ask(service, "/v1/models").status_code == 401
    return ask(service, "/")


class TestFile:
    def test_it_needs_no_key_and_may_ask_this_server_alone(self, answer):
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

    def test_it_needs_no_other_file_and_takes_text_for_nothing_else(self, answer):
        assert not re.search(r"https?://|url\(|@import|<(?:script|link)[^>]* src", answer.text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|localStorage", answer.text)
        assert '<meta name="viewport" content="width=device-width' in answer.text
        assert "prefers-color-scheme: dark" in answer.text


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    with running([sys.executable, "-m", "page_server"], tmp_path_factory.mktemp("page")) as (_, address):
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A browser without a window, of the size of a phone."""
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
        size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        found.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield found
    finally:
        found.quit()


class Page:
    """The page in a browser, as a person uses it."""

    def __init__(self, browser, address: str):
        from selenium.webdriver.support.ui import WebDriverWait

        self.browser, self._wait = browser, WebDriverWait(browser, SECONDS, poll_frequency=0.02)
        browser.get_log("browser")  # of the page before
        browser.get(address)

    def of(self, id: str):
        return self.browser.find_element("id", id)

    def until(self, condition):
        return self._wait.until(lambda _: condition())

    def fill(self, id: str, value: str):
        self.of(id).clear()
        self.of(id).send_keys(value)

    def enter_key(self):
        self.until(lambda: self.of("key").is_displayed())
        self.fill("key", KEY + "\n\t")
        self.until(lambda: self.of("model").text == "table")

    def idle(self) -> bool:
        return self.of("go").is_enabled()

    def click(self, id: str):
        self.of(id).click()
        self.until(self.idle)

    def slide(self, id: str, value: int):
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        self.browser.execute_script(script, self.of(id), value)

    def sources(self) -> list[str]:
        return [span.get_attribute("class") for span in self.of("text").find_elements("tag name", "span")]

    def shares(self) -> list[float]:
        bars = self.of("chart").find_elements("tag name", "b")
        return [float(bar.get_attribute("data-share")) for bar in bars]

    def log(self) -> list[str]:
        """What the browser complained of, answers with an error apart."""
        found = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
        return [message for message in found if "Failed to load" not in message]


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
    assert page.of("how").text == "drafter: draft_model · verify: rejection · draft sampling: auto · K: 3"


def test_page_shades_accepted_drafts_and_draws_a_chart(page):
    page.fill("max-tokens", "60")
    page.fill("seed", "7")
    page.click("go")
    text = page.of("text").text
    assert HTML in text
    assert {"draft", "correction", "bonus"} == set(page.sources())
    colours = {
        page.browser.execute_script(
            "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor", f"#text .{s}"
        )
        for s in ("draft", "correction", "bonus")
    }
    assert len(colours) == 3
    first, *others = page.shares()
    assert 1 > first > others[0] >= others[1] > 0
    assert page.of("with-tokens").text == "60"
    assert page.of("with-seed").text == "7"
    assert float(page.of("with-rate").text) > 0
    assert float(page.of("with-length").text) > 1.5
    assert page.log() == []
    # What the model wrote has stayed text.
    assert page.browser.title == "jspec"
    assert page.of("text").find_elements("tag name", "img") == []


def test_page_compares_with_plain_decoding_of_the_same_seed(page):
    page.fill("max-tokens", "40")
    page.fill("temperature", "0")
    page.click("go")
    text, seed = page.of("text").text, page.of("with-seed").text
    assert seed.isdigit()
    page.click("plain")
    assert page.of("text").text == text
    assert set(page.sources()) == {"target"}
    assert (page.of("without-seed").text, page.of("without-length").text) == (seed, "1.00")
    assert float(page.of("without-rate").text) > 0
    assert page.of("with-tokens").text == page.of("without-tokens").text == "40"
    assert "they are made all the same" in page.of("plain-note").text


def test_page_can_reduce_the_drafts_of_a_round(page):
    page.fill("max-tokens", "40")
    page.slide("drafts", 1)
    page.click("go")
    first, *others = page.shares()
    assert first > 0
    assert others == [0, 0]
    assert 1 < float(page.of("with-length").text) <= 2


def test_page_can_chat(page):
    page.of("mode-chat").click()
    for turn in (1, 2):
        page.fill("max-tokens", "30")
        page.fill("temperature", "0")  # a sampled text may begin with any token
        page.fill("prompt", "<b>hello</b>")
        page.click("go")
        turns = [one.text for one in page.of("turns").find_elements("class name", "turn")]
        assert turns[-1] == "user\n<b>hello</b>"
        assert len(turns) == 2 * turn - 1
    assert turns[1].startswith("assistant\n<img")
    page.of("forget").click()
    assert page.of("turns").text == page.of("text").text == ""


def test_page_can_stop_a_request(page):
    page.fill("max-tokens", "16000")  # so many that the stop comes before the end on the slowest machine
    page.of("go").click()
    page.until(lambda: page.of("text").text)
    page.click("stop")
    assert 0 < int(page.of("with-tokens").text) < 16_000
    assert not page.of("error").is_displayed()


def test_page_shows_errors(page):
    page.fill("max-tokens", "0")
    page.click("go")
    assert "max_tokens=0: expected" in page.of("error").text
    page.fill("max-tokens", "3")
    page.fill("seed", "9223372036854775807")
    page.click("go")
    assert "Seed: expected a number, of at most 9007199254740991" in page.of("error").text
    page.fill("seed", "9007199254740991")
    page.click("go")
    assert not page.of("error").is_displayed()
    assert page.of("text").text


def test_page_fits_on_a_phone(page):
    page.click("go")
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= 390
