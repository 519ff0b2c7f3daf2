"""Downloads: from a server of this process, which breaks off, lies or dies."""

import gzip
import hashlib
import http.server
import os
import pathlib
import pty
import random
import signal
import socket
import subprocess
import sys
import termios
import threading
import time

import pytest

from experiments.data.text import registry
from experiments.data.text.fetch import Patience, fetch
from experiments.data.text.registry import CorpusFile, PublicCorpus
from experiments.errors import UserError
from tests.experiments import processes

WORDS = random.Random(0).choices(["ein", "zwei", "drei", "vier"], k=50_000)
TEXT = " ".join(WORDS).encode()
SENT = {
  "/1f/raw/train.en.gz": gzip.compress(TEXT),
  "/2e/tok/train.tok.en": TEXT[::-1],
}
NAMES = ["train.en.gz", "train.tok.en"]
FIRST, SECOND = SENT
HURRY = Patience(timeout=5.0, delays=(0.0, 0.0))


def sha256(content):
  return hashlib.sha256(content).hexdigest()


CORPUS = PublicCorpus(
  "http://unused.invalid",
  (
    CorpusFile(FIRST[1:], sha256(TEXT)),
    CorpusFile(SECOND[1:], sha256(TEXT[::-1])),
  ),
  config="configs/tiny.py",
)


class Source(http.server.ThreadingHTTPServer):
  """Serves `sent`; `faults` are what it does wrong, request by request.

  A fault is a status, "stall", or the number of bytes after which it hangs up.
  """

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.sent, self.faults, self.ranges = dict(SENT), [], True
    self.asked: list[tuple[str, str | None]] = []
    self.bytes: list[int] = []
    self.closed = threading.Event()

  @property
  def url(self):
    return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    source, asked = self.server, self.headers["Range"]
    source.asked.append((self.path, asked))
    fault = source.faults.pop(0) if source.faults else None
    if fault == "stall":
      source.closed.wait(20.0)
      return
    content = source.sent.get(self.path)
    if isinstance(fault, tuple) or content is None:
      self.send_error(fault[0] if fault else 404)
      return
    start = 0
    if asked and source.ranges:
      start = int(asked.removeprefix("bytes=").removesuffix("-"))
      if start >= len(content):
        self.send_error(416)
        return
    rest = content[start:]
    self.send_response(206 if start else 200)
    self.send_header("Content-Length", str(len(rest)))
    self.end_headers()
    source.bytes.append(len(rest[:fault]))  # before the client goes on
    self.wfile.write(rest[:fault])

  def log_message(self, *_):
    pass


@pytest.fixture
def source(monkeypatch):
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  with Source() as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.closed.set()
    server.shutdown()
    thread.join()


def get(source, directory, patience=HURRY):
  fetch(CORPUS, directory, base_url=source.url, patience=patience)


def files(directory):
  return {path.name: path.read_bytes() for path in directory.iterdir()}


EXPECTED = {path.rpartition("/")[2]: content for path, content in SENT.items()}


def test_all_files_come_under_their_names(source, tmp_path):
  get(source, tmp_path / "new" / "folder")
  assert files(tmp_path / "new" / "folder") == EXPECTED
  assert source.asked == [(FIRST, None), (SECOND, None)]


def test_what_is_there_is_not_fetched_again(source, tmp_path):
  get(source, tmp_path)
  (tmp_path / NAMES[1]).unlink()
  get(source, tmp_path)
  assert files(tmp_path) == EXPECTED
  assert [path for path, _ in source.asked] == [FIRST, SECOND, SECOND]


def test_another_file_of_the_name_is_left_alone(source, tmp_path):
  (tmp_path / NAMES[1]).write_text("my own")
  with pytest.raises(UserError, match=rf"{NAMES[1]}: is another file .*away"):
    get(source, tmp_path)
  assert (tmp_path / NAMES[1]).read_text() == "my own"


@pytest.mark.parametrize("path", SENT)
def test_a_broken_connection_goes_on_where_it_was(path, source, tmp_path):
  source.faults = [1000] if path == FIRST else [None, 1000]
  get(source, tmp_path)
  assert files(tmp_path) == EXPECTED
  assert source.asked.count((path, None)) == 1
  assert source.asked.count((path, "bytes=1000-")) == 1
  assert sum(source.bytes) == sum(map(len, SENT.values()))


def test_a_later_run_goes_on_where_one_gave_up(source, tmp_path):
  source.faults = [1000, 0, 0]
  message = r"broke off after 1,000 of [\d,]+ bytes, after 3 attempts"
  with pytest.raises(UserError, match=message):
    get(source, tmp_path)
  part = SENT[FIRST][:1000]
  assert files(tmp_path) == {f"{NAMES[0]}.part": part}
  del source.asked[:], source.bytes[:]
  get(source, tmp_path)
  assert files(tmp_path) == EXPECTED
  assert source.asked[0] == (FIRST, "bytes=1000-")
  assert source.bytes[0] == len(SENT[FIRST]) - 1000


def test_a_server_that_knows_no_ranges_starts_over(source, tmp_path):
  source.ranges, source.faults = False, [1000]
  get(source, tmp_path)
  assert files(tmp_path) == EXPECTED
  assert source.bytes[:2] == [1000, len(SENT[FIRST])]


def test_a_server_that_knows_no_ranges_breaks_off(source, tmp_path):
  source.ranges, source.faults = False, [1000, 3000, 2000]
  total = f"{len(SENT[FIRST]):,}"
  with pytest.raises(UserError, match=f"broke off after 2,000 of {total} "):
    get(source, tmp_path)
  assert files(tmp_path) == {f"{NAMES[0]}.part": SENT[FIRST][:2000]}


@pytest.mark.parametrize("extra", [b"", b"more"])
def test_a_part_that_has_no_rest_starts_over(extra, source, tmp_path):
  (tmp_path / f"{NAMES[0]}.part").write_bytes(SENT[FIRST] + extra)
  get(source, tmp_path)
  assert files(tmp_path) == EXPECTED


@pytest.mark.parametrize("fault", [(503,), (429,), "stall"])
def test_what_may_pass_is_tried_again(fault, source, tmp_path):
  source.faults, began = [fault], time.monotonic()
  get(source, tmp_path, HURRY._replace(timeout=0.2))
  assert time.monotonic() - began < 10.0
  assert files(tmp_path) == EXPECTED
  assert source.asked[:2] == [(FIRST, None)] * 2


def test_it_is_the_content_that_counts(source, tmp_path):
  source.sent[FIRST] = gzip.compress(TEXT, compresslevel=1, mtime=7)
  assert source.sent[FIRST] != SENT[FIRST]
  get(source, tmp_path)
  assert (tmp_path / NAMES[0]).read_bytes() == source.sent[FIRST]


LIES = {
  "another text": (gzip.compress(b"lies"), sha256(b"lies")),
  "no gzip": (b"<html>", "none (Not a gzipped file (b'<h'))"),
  "half a gzip": (SENT[FIRST][:1000], "none (Compressed file ended before"),
  "bad gzip": (SENT[FIRST][:50] + bytes(500), "none (Error -3 while decomp"),
}


@pytest.mark.parametrize("lie", LIES)
def test_wrong_content_is_refused_and_removed(lie, source, tmp_path):
  source.sent[FIRST], found = LIES[lie]
  with pytest.raises(UserError) as error:
    get(source, tmp_path)
  message = str(error.value)
  assert message.startswith(f"{NAMES[0]}: refused and removed; ")
  assert f"expected {sha256(TEXT)}, got {found}" in message
  assert files(tmp_path) == {}


def test_a_missing_file_is_said_at_once(source, tmp_path):
  del source.sent[SECOND]
  with pytest.raises(UserError, match=rf"{SECOND}: HTTP 404 Not Found$"):
    get(source, tmp_path)
  assert [path for path, _ in source.asked] == [FIRST, SECOND]
  assert files(tmp_path) == {NAMES[0]: EXPECTED[NAMES[0]]}


def test_no_network_is_one_line(source, tmp_path):
  with socket.socket() as taken:  # bound, and nobody listens
    taken.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(UserError) as error:
      fetch(CORPUS, tmp_path, base_url=url, patience=HURRY)
  assert str(error.value).startswith(f"{url}{FIRST}: Connection refused, after")
  assert "\n" not in str(error.value)
  assert files(tmp_path) == {}


@pytest.mark.parametrize("url", ["ftp://x", "file:///etc", "x", "https:/x"])
def test_only_http_and_https(url, tmp_path):
  with pytest.raises(UserError, match=rf"--base_url={url}: must begin with"):
    fetch(CORPUS, tmp_path / "new", base_url=url)
  assert files(tmp_path) == {}


@pytest.mark.parametrize("url", ["http://[", "http://x:y", "http://a b"])
def test_an_address_that_is_none(url, tmp_path):
  with pytest.raises(UserError, match="is no address"):
    fetch(CORPUS, tmp_path, base_url=url)


@pytest.mark.parametrize("scheme", ["ftp", "file"])
def test_no_redirection_elsewhere(scheme, source, tmp_path, monkeypatch):
  def redirect(handler):
    handler.send_response(302)
    handler.send_header("Location", f"{scheme}://127.0.0.1:1/x")
    handler.end_headers()

  monkeypatch.setattr(Handler, "do_GET", redirect)
  with pytest.raises(UserError, match=rf"unknown url type: ftp|{scheme}:///?"):
    get(source, tmp_path)


def test_a_directory_that_is_a_file(source, tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"file: is a file; must be a directory"):
    get(source, tmp_path / "file")
  with pytest.raises(UserError, match=r"folder: cannot be written \(Not a"):
    get(source, tmp_path / "file" / "folder")
  assert source.asked == []


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="of Linux")
def test_a_full_disk(source, tmp_path):
  (tmp_path / f"{NAMES[0]}.part").symlink_to("/dev/full")
  with pytest.raises(UserError, match=r"cannot be written \(No space"):
    get(source, tmp_path)
  assert len(source.asked) == 1
  assert not (tmp_path / NAMES[0]).exists()


def test_an_unknown_corpus_names_those_known():
  with pytest.raises(UserError, match=r"'multi31k'; known: multi30k$"):
    registry.find_corpus("multi31k")
  assert registry.find_corpus("tiny", {"tiny": CORPUS}) is CORPUS


# The binary, with one more corpus.
PROGRAM = f"""
import runpy
from experiments.data.text.registry import CORPORA, PublicCorpus, CorpusFile
CORPORA["tiny"] = {CORPUS!r}
runpy.run_module("experiments.download", run_name="__main__")
"""


def start_tiny(source, directory, **options):
  flag = f"--base_url={source.url}/"
  return subprocess.Popen(
    [sys.executable, "-c", PROGRAM, "tiny", str(directory), flag],
    env=processes.environment(),
    **options,
  )


@pytest.mark.slow
def test_the_binary_says_what_it_did_and_what_next(source, tmp_path):
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  folder = tmp_path / "my data"
  with start_tiny(source, folder, **pipes) as process:
    out, error = process.communicate(timeout=60)
  assert process.returncode == 0, error
  assert files(folder) == EXPECTED
  assert error.splitlines() == [
    f"{name}: fetched, {len(content):,} bytes"
    for name, content in EXPECTED.items()
  ]
  assert out == (
    f"tiny: 2 files in {folder}, to train on with\n"
    "  python -m experiments.train --config=configs/tiny.py"
    f" --config.data.dir='{folder}'\n"
  )
  with start_tiny(source, folder, **pipes) as process:
    out, error = process.communicate(timeout=60)
  assert error.splitlines() == [f"{name}: already there" for name in EXPECTED]


@pytest.mark.slow
def test_a_terminal_shows_rate_and_time_left(source, tmp_path):
  leader, follower = pty.openpty()
  termios.tcsetwinsize(follower, (40, 120))
  with start_tiny(source, tmp_path, stderr=follower) as process:
    assert process.wait(60) == 0
  os.close(follower)
  shown = os.read(leader, 100_000).decode(errors="replace")
  os.close(leader)
  assert f"{NAMES[1]}:   0%|" in shown
  assert "B/s]" in shown
  assert f"{NAMES[1]}: fetched" in shown


MISTAKES = {
  "nothing": ([], "missing CORPUS and DIR; give CORPUS DIR. See --help."),
  "no directory": (["multi30k"], "missing DIR; give CORPUS DIR. See --help."),
  "a third": (["multi30k", "{tmp}", "now"], "unknown argument 'now'; flags"),
  "unknown corpus": (["wmt", "{tmp}"], "unknown corpus 'wmt'; known: multi30k"),
  "unknown flag": (["multi30k", "{tmp}", "--base=x"], "base"),
  "not writable": (["multi30k", "/proc/x"], "/proc/x: cannot be written"),
  "no such files": (
    ["multi30k", "{tmp}", "--base_url={url}"],
    "/data/task1/raw/train.en.gz: HTTP 404 Not Found",
  ),
  "other content": (
    ["--base_url={url}/lies", "multi30k", "{tmp}"],
    "train.en.gz: refused and removed; SHA-256 of its content: expected"
    f" {registry.CORPORA['multi30k'].files[0].sha256}, got {sha256(TEXT)}",
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake, source, tmp_path):
  path = registry.CORPORA["multi30k"].files[0].path
  source.sent[f"/lies/{path}"] = SENT[FIRST]
  arguments, message = MISTAKES[mistake]
  places = {"tmp": tmp_path, "url": source.url}
  arguments = [each.format(**places) for each in arguments]
  code, out, error = processes.run("download", *arguments)
  assert code == 2, error
  assert message in error
  assert error.startswith("error: ")
  assert len(error.splitlines()) <= 2, error
  assert out == ""
  assert files(tmp_path) == {}


@pytest.mark.slow
def test_help_names_the_arguments_and_needs_no_jax(tmp_path):
  (tmp_path / "jax.py").write_text("raise ImportError('jax was imported')")
  path = f"{tmp_path}{os.pathsep}{processes.ROOT}"
  _, out, error = processes.run("download", "--help", PYTHONPATH=path)
  assert "jax was imported" not in out + error
  for needed in ("CORPUS DIR", "multi30k", "--base_url"):
    assert needed in out


@pytest.fixture
def heeded_sigint():
  """Not ignored, as it is by what a shell starts in the background."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_sigint")
def test_an_interrupted_run_keeps_what_came(source, tmp_path):
  source.faults = [1000]
  pipe = {"stderr": subprocess.PIPE, "text": True}
  with start_tiny(source, tmp_path, **pipe) as process:
    assert "again in 1 s" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.stderr.read() == "error: interrupted\n"
  assert process.returncode == 130
  assert files(tmp_path) == {f"{NAMES[0]}.part": SENT[FIRST][:1000]}
