"""Control headless Chromium through a pipe with its DevTools protocol, without further packages."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from itertools import count

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)
# Chromium reads commands from file descriptor 3 and writes answers to 4.
START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
LIMIT = 60  # seconds to wait for an answer


def find_browser():
    """Return the path of Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser: `with Browser() as page: page.open(path); page.evaluate("document.title")`."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ends = [*os.pipe(), *os.pipe()]
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ends[0], ends[3])]  # not 3 or 4
        words = [sys.executable, "-c", START, *map(str, theirs), find_browser(), *FLAGS]
        self.process = subprocess.Popen(
            [*words, f"--user-data-dir={self.folder.name}"],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (ends[0], ends[3], *theirs):
            os.close(fd)
        self.answers, self.orders = os.fdopen(ends[2], "rb"), os.fdopen(ends[1], "wb")
        self.left, self.numbers, self.session, self.events = b"", count(1), None, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *error):
        self.orders.close()
        self.answers.close()
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def send(self, method, **params):
        """Send a command; return the answer, and keep events that come before it."""
        order = {"id": next(self.numbers), "method": method, "params": params}
        if self.session:
            order["sessionId"] = self.session
        self.orders.write(json.dumps(order).encode() + b"\0")
        self.orders.flush()
        while (answer := self._read()).get("id") != order["id"]:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _read(self):
        while b"\0" not in self.left:
            ready, _, _ = select.select([self.answers], [], [], LIMIT)
            more = os.read(self.answers.fileno(), 2**20) if ready else b""
            assert more, f"the browser has ended or says nothing for {LIMIT} s"
            self.left += more
        text, _, self.left = self.left.partition(b"\0")
        return json.loads(text)

    def open(self, path):
        """Open a file, and wait until it has loaded."""
        self.events.clear()
        self.send("Page.navigate", url=path.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, script):
        """Return the value of an expression in the page; wait for promises."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def problems(self):
        """Return all log messages, exceptions, failed requests and requests to other machines."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed")
        found = [event for event in self.events if event["method"] in kinds]
        asked = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return found + [it for it in asked if not it["params"]["request"]["url"].startswith(("file:", "data:"))]

    def look(self, width=1200, height=900, scheme="light", medium="screen"):
        """Show the page in a window of this size, with a colour scheme, on screen or as printed."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=medium, features=features)

    def pdf(self):
        """Return the page as a PDF in A4, without the browser's headers and footers."""
        self.send("Emulation.setEmulatedMedia", media="", features=[])
        paper = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": False}
        return base64.b64decode(self.send("Page.printToPDF", **paper)["data"])

    def picture(self, whole=True):
        """Return the page as a PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])
