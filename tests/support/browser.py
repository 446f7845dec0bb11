"""A page in headless Chromium, driven through a pipe by the Chrome DevTools Protocol: one JSON object a message."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --remote-debugging-pipe"
).split()
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
SHIFT = 8


class Page:
    """A page of a running browser. ``complaints`` holds what the page wrote to the console, errors among them."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from, self._sent, self.complaints = to_browser, from_browser, 0, []
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of one command."""
        self._sent += 1
        session = {"sessionId": self._session} if self._session else {}
        self._to.write(json.dumps({"id": self._sent, "method": method, "params": params, **session}).encode() + b"\0")
        self._to.flush()
        while True:
            said = self._read()
            if said.get("id") == self._sent:
                assert "error" not in said, (method, said["error"])
                return said["result"]
            if said.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                self.complaints.append(said["params"])

    def _read(self):
        found = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        return json.loads(found)

    def open(self, address, width=1280, height=800, dark=False):
        """Loads an address in a window of the given size and scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)

    def value(self, expression):
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression, seconds=60):
        """Waits until an expression is true, and returns its value."""
        end = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"{expression} has not come true; the page shows:\n{self.text('body')}"
            time.sleep(0.02)
        return found

    def text(self, selector):
        """The text of an element."""
        return self.value(f"document.querySelector({json.dumps(selector)})?.innerText")

    def type(self, text):
        """Types into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        """Presses a key and lets it go."""
        code, text = KEYS[key]
        given = dict(key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers)
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def picture(self, path):
        """Saves what the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser(folder):
    """A page of a new headless browser, whose profile lies in ``folder``."""
    (theirs_in, to_browser), (from_browser, theirs_out) = os.pipe(), os.pipe()
    # The browser reads commands from file descriptor 3 and writes to 4.
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    command = ["bash", "-c", shell, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile"]
    process = subprocess.Popen(
        command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        with os.fdopen(to_browser, "wb") as to, os.fdopen(from_browser, "rb") as back:
            yield Page(to, back)
    finally:
        process.kill()
        process.wait()
