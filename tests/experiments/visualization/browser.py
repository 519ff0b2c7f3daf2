"""Drives a headless Chromium through the pipe of its DevTools protocol."""

import base64
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

CHROMIUM = next(
  filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))),
  None,
)


class Browser:
  """A page of a browser; `errors` are those that the page reported."""

  def __enter__(self):
    self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    read, self._write = os.pipe()
    self._read, write = os.pipe()
    # Chromium reads commands from file descriptor 3 and writes to 4.
    redirected = f'exec {CHROMIUM} "$@" 3<&{read} 4>&{write}'
    self._process = subprocess.Popen(
      [
        *("bash", "-c", redirected, "chromium", "--headless"),
        *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"),
        "about:blank",
      ],
      pass_fds=(read, write),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    self._numbers, self._buffer = itertools.count(1), b""
    self._session, self.errors, self._loaded = None, [], False
    target = self._call("Target.createTarget", url="about:blank")
    attached = self._call(
      "Target.attachToTarget", targetId=target["targetId"], flatten=True
    )
    self._session = attached["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self._call(f"{domain}.enable")
    return self

  def __exit__(self, *_):
    os.close(self._write)
    self._process.terminate()
    self._process.wait(30)
    os.close(self._read)
    self._folder.cleanup()

  def open(self, path, *, width=1280, height=900, dark=False):
    """Opens a file and waits until it is loaded."""
    self._call(
      "Emulation.setDeviceMetricsOverride",
      width=width,
      height=height,
      deviceScaleFactor=1,
      mobile=width < 600,
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    self._call("Emulation.setEmulatedMedia", features=[scheme] if dark else [])
    self._loaded, self.requests = False, []
    self._call("Page.navigate", url=pathlib.Path(path).absolute().as_uri())
    while not self._loaded:
      self._receive()

  def evaluate(self, expression):
    """The value of a JavaScript expression, which JSON can express."""
    result = self._call(
      "Runtime.evaluate", expression=expression, returnByValue=True
    )
    assert "exceptionDetails" not in result, result["exceptionDetails"]
    return result["result"].get("value")

  def hover(self, selector):
    """Moves the mouse to the middle of an element."""
    box = self.evaluate(
      f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
      " node.scrollIntoView({block: 'center', inline: 'center'});"
      " const box = node.getBoundingClientRect();"
      " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    self._call(
      "Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1]
    )

  def press(self, key):
    """Presses a key such as "ArrowDown"."""
    for kind in ("keyDown", "keyUp"):
      self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

  def screenshot(self, path):
    """Writes a picture of the whole page."""
    picture = self._call("Page.captureScreenshot", captureBeyondViewport=True)
    pathlib.Path(path).write_bytes(base64.b64decode(picture["data"]))

  def _call(self, method, **parameters):
    number = next(self._numbers)
    message = {"id": number, "method": method, "params": parameters}
    if self._session:
      message["sessionId"] = self._session
    os.write(self._write, json.dumps(message).encode() + b"\0")
    while True:
      reply = self._receive()
      if reply.get("id") == number:
        assert "error" not in reply, reply
        return reply["result"]

  def _receive(self):
    """The next message; notes what the page reports."""
    while b"\0" not in self._buffer:
      self._buffer += os.read(self._read, 1 << 20) or b"{}\0"
    line, _, self._buffer = self._buffer.partition(b"\0")
    message = json.loads(line)
    parameters = message.get("params", {})
    match message.get("method"):
      case "Page.loadEventFired":
        self._loaded = True
      case "Runtime.exceptionThrown":
        self.errors.append(parameters["exceptionDetails"])
      case "Log.entryAdded":
        self.errors.append(parameters["entry"])
      case "Network.requestWillBeSent":
        self.requests.append(parameters["request"]["url"])
    return message
