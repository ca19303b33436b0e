"""Debian's Chromium without a window, driven over its pipe with the DevTools protocol."""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

PATIENCE = 60


def find_chromium():
    """The program, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page. Errors and warnings of its console are in `problems`."""

    def __init__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="ballast-chromium-",
                                                    ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                   "--disable-background-networking", "--disable-component-update",
                   "--hide-scrollbars", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                   f"--user-data-dir={self._profile.name}", "about:blank"]

        def place():
            """The browser reads from descriptor 3 and writes to 4."""
            read = fcntl.fcntl(to_browser, fcntl.F_DUPFD, 5)
            write = fcntl.fcntl(from_browser, fcntl.F_DUPFD, 5)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(command, close_fds=False, preexec_fn=place,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events = []
        self.problems = []
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _send(self, method, parameters=None, session=None):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive(PATIENCE)
            if reply.get("id") == number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self._note(reply)

    def _receive(self, patience):
        deadline = time.monotonic() + patience
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser does not answer")
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event):
        self.events.append(event)
        method, details = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(details["exceptionDetails"])[:500])
        if method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(details["args"])[:500])
        if method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.problems.append(details["entry"]["text"])

    def call(self, method, **parameters):
        return self._send(method, parameters, self._session)

    def size(self, width, height=900, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, url):
        """Returns the seconds until the page's script has run."""
        start = time.monotonic()
        self.call("Page.navigate", url=str(url))
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
        return time.monotonic() - start

    def run(self, script):
        """The value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"])[:800])
        return done["result"].get("value")

    def wait_for(self, script, patience=PATIENCE):
        deadline = time.monotonic() + patience
        while not self.run(script):
            if time.monotonic() > deadline:
                raise TimeoutError(script)
            time.sleep(0.02)

    def press(self, key, text=None, modifiers=0):
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers,
                      **({"windowsVirtualKeyCode": 9} if key == "Tab" else {}), **more)

    def picture(self, whole=True, clip=None):
        """A PNG of the page, or of the rectangle `clip` (x, y, width, height)."""
        more = {"clip": {**dict(zip(("x", "y", "width", "height"), clip)), "scale": 1}} if clip else {}
        done = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **more)
        return base64.b64decode(done["data"])

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()
