"""A real browser: headless Chromium, spoken to in its DevTools protocol over a pipe, so that no port is taken.

`faults(path)` looks at an HTML file in light and dark, on a screen and on a phone, and says what is wrong with it."""

import base64
import itertools
import json
import os
import subprocess
from pathlib import Path

LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (1100, 360)]

# Contrast by WCAG's formula, of the text that is meant to be read against the page.
SEEN = """(() => {
  const rgb = c => c.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = rgb(c).map(v => linear(v / 255)); return .2126 * r + .7152 * g + .0722 * b; };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const contrast = (c) => { const [a, b] = [light(c), page].sort((x, y) => y - x); return (a + .05) / (b + .05); };
  const texts = [...document.querySelectorAll('h1, h2, p, td, th, figcaption, a')].map(e => getComputedStyle(e).color);
  const drawn = [...document.querySelectorAll('svg text')].map(e => getComputedStyle(e).fill);
  return {
    page, title: document.title, sections: document.querySelectorAll('h2').length,
    width: document.documentElement.scrollWidth, room: document.documentElement.clientWidth,
    images: [...document.images].map(i => [i.alt, i.complete ? i.naturalWidth : 0, i.getBoundingClientRect().width]),
    svgs: [...document.querySelectorAll('svg')].map(s => [s.getAttribute('aria-label'),
      s.querySelectorAll('path, use, rect').length, s.getBoundingClientRect().width, s.getBoundingClientRect().height]),
    contrast: Math.min(...texts.concat(drawn).map(contrast)),
  };
})()"""


class Browser:
    def __init__(self, profile: Path):
        there, self._out = os.pipe()
        self._in, back = os.pipe()
        # Chromium reads its orders from file 3 and answers on 4.
        chromium = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        command = ["bash", "-c", f'exec "$@" 3<&{there} 4>&{back}', "bash", *chromium]
        self._process = subprocess.Popen(
            command, pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(back)
        self._numbers, self._rest, self.events = itertools.count(1), b"", []

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.call("Browser.close")
        else:
            self._process.kill()
        self._process.wait(timeout=30)
        os.close(self._in)
        os.close(self._out)

    def call(self, method, session=None, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def wait_for(self, method):
        while not any(event["method"] == method for event in self.events):
            self._next()

    def _next(self):
        while b"\0" not in self._rest:
            got = os.read(self._in, 1 << 16)
            assert got, "Chromium has gone: is it installed?"
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        answer = json.loads(message)
        if "method" in answer:
            self.events.append(answer)
        return answer

    def look(self, path: Path, scheme: str, width: int, picture: Path | None = None) -> dict:
        """What is on the page at that width; `errors` and `requests` as the browser logs them."""
        self.events.clear()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        self.call("Emulation.setEmulatedMedia", session, features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", session, url=path.absolute().as_uri())
        self.wait_for("Page.loadEventFired")
        if picture is not None:
            shot = self.call("Page.captureScreenshot", session, captureBeyondViewport=True)
            picture.write_bytes(base64.b64decode(shot["data"]))
        seen = self.call("Runtime.evaluate", session, expression=SEEN, returnByValue=True)["result"]["value"]
        self.call("Target.closeTarget", targetId=target)
        return {**seen, "errors": list(map(str, self._errors())), "requests": list(self._requests(path))}

    def _errors(self):
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                yield params["exceptionDetails"]["text"]
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                yield params["entry"]["text"]
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                yield params["args"]

    def _requests(self, path):
        for event in self.events:
            if event["method"] == "Network.requestWillBeSent":
                url = event["params"]["request"]["url"]
                if url != path.absolute().as_uri() and not url.startswith(("data:", "about:")):
                    yield url


def faults(path: Path, profile: Path, pictures: Path | None = None) -> list[str]:
    """What is wrong with an HTML file, in any of the `LOOKS`; [] if nothing. `pictures`: a folder for screenshots."""
    found = []
    with Browser(profile) as browser:
        for scheme, width in LOOKS:
            shot = pictures and pictures / f"{scheme}-{width}.png"
            seen = browser.look(path, scheme, width, shot)
            wrong = [f"error: {error}" for error in seen["errors"]]
            wrong += [f"request: {url}" for url in seen["requests"]]
            if seen["width"] > seen["room"]:
                wrong.append(f"the page is {seen['width']} wide")
            wrong += [f"image {alt!r} is missing" for alt, width_, shown in seen["images"] if not (width_ and shown)]
            for label, parts, *size in seen["svgs"]:
                if parts < 5 or min(size) < 100:
                    wrong.append(f"plot {label!r} is empty")
            if seen["contrast"] < 4.5:
                wrong.append(f"some text has a contrast of {seen['contrast']:.1f} only")
            if (seen["page"] < 0.5) != (scheme == "dark"):
                wrong.append("the page is not in its colours")
            if not (seen["title"] and seen["sections"]):
                wrong.append("there is nothing on the page")
            found += [f"{scheme}, {width} pixels: {what}" for what in wrong]
    return found
