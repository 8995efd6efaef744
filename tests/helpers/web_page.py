"""The page at ``/`` in a browser, as a person uses it."""

import json
import shlex

from page_server import KEY

SECONDS = 60  # that anything may take


class Page:
    """The page in a browser, as a person uses it: on a phone, unless the width says otherwise."""

    def __init__(self, browser, address: str, width: int = 390):
        from selenium.webdriver.support.ui import WebDriverWait

        self.browser, self._wait = browser, WebDriverWait(browser, SECONDS, poll_frequency=0.02)
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get_log("browser")  # of the page before
        browser.get(address)
        self.open("settings")

    def of(self, id: str):
        return self.browser.find_element("id", id)

    def all(self, selector: str) -> list:
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of elements, with their blanks."""
        return [element.get_property("textContent") for element in self.all(selector)]

    def run(self, script: str, *args):
        return self.browser.execute_script(script, *args)

    def open(self, id: str):
        self.run("arguments[0].open = true", self.of(id))

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

    def chat(self, text: str, **settings: str):
        self.of("mode-chat").click()
        for id, value in settings.items():
            self.fill(id, value)
        self.fill("prompt", text)
        self.click("go")

    def complete(self, **settings: str):
        self.of("mode-prompt").click()
        for id, value in settings.items():
            self.fill(id.replace("_", "-"), value)
        self.click("go")

    def slide(self, id: str, value: int):
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        self.run(script, self.of(id), value)

    def answers(self) -> list[str]:
        return self.texts(".log:not([hidden]) .answer .blocks")

    def labels(self) -> list[str]:
        return self.texts(".log:not([hidden]) .answer .label")

    def endings(self) -> list[str]:
        return self.texts(".log:not([hidden]) .answer .ending")

    def sources(self, answer: int = 0) -> list[str]:
        """The sources of an answer's pieces of text; 0 is the first answer."""
        shown = self.all(".log:not([hidden]) .answer")[answer]
        return self.run("return [...arguments[0].querySelectorAll('.text span')].map((span) => span.className)", shown)

    def shares(self) -> list[float]:
        bars = self.of("chart").find_elements("tag name", "b")
        return [float(bar.get_attribute("data-share")) for bar in bars]

    def curl(self) -> list[str]:
        """The words of the curl command as a shell reads them."""
        return shlex.split(self.of("curl").get_property("textContent"))

    def request(self) -> dict:
        """The body of the last request."""
        return json.loads(self.curl()[-1])

    def answer_with(self, *choices: dict, prompt_tokens: int = 3):
        """Let later requests have this answer, one chunk for each choice, instead of the server's."""
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 5}
        chunks = [{"choices": [{"index": 0, "finish_reason": None, **choice}], "usage": usage} for choice in choices]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.run("const text = arguments[0]; window.fetch = async () => new Response(text)", events)

    def log(self) -> list[str]:
        """What the browser complained of, answers with an error apart."""
        found = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
        return [message for message in found if "Failed to load" not in message]
