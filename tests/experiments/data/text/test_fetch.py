"""Downloads from a local server that fails in every way a real one does."""

import errno
import gzip
import hashlib
import http.server
import os
import pathlib
import pty
import random
import socket
import subprocess
import sys
import termios
import threading

import pooch
import pytest

from experiments.data.text import registry
from experiments.data.text.fetch import fetch
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
  """Serves `sent`; `faults` holds the fault of each request, in order.

  A fault is (status,), "stall", or the number of bytes after which the
  connection is closed.
  """

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.sent, self.faults = dict(SENT), []
    self.requests: list[str] = []
    self.closed = threading.Event()

  @property
  def url(self):
    return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    source = self.server
    source.requests.append(self.path)
    fault = source.faults.pop(0) if source.faults else None
    if fault == "stall":
      source.closed.wait(600.0)
      return
    content = source.sent.get(self.path)
    if isinstance(fault, tuple) or content is None:
      self.send_error(fault[0] if fault else 404)
      return
    self.send_response(200)
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    self.wfile.write(content[:fault])

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


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
  """Retries follow at once."""
  monkeypatch.setattr(pooch.core.time, "sleep", lambda seconds: None)


def get(source, directory, timeout=600.0):
  fetch(CORPUS, directory, base_url=source.url, timeout=timeout, retries=2)


def files(directory):
  return {path.name: path.read_bytes() for path in directory.iterdir()}


EXPECTED = {path.rpartition("/")[2]: content for path, content in SENT.items()}


def test_files_are_stored_under_their_names(source, tmp_path):
  folder = tmp_path / "new" / "folder"
  get(source, folder)
  assert files(folder) == EXPECTED
  assert source.requests == [FIRST, SECOND]
  created = tmp_path / "file"
  created.touch()  # with the permissions that the umask gives
  assert (
    len({each.stat().st_mode for each in (*folder.iterdir(), created)}) == 1
  )


def test_only_missing_files_are_downloaded(source, tmp_path):
  get(source, tmp_path)
  (tmp_path / NAMES[1]).unlink()
  get(source, tmp_path)
  assert files(tmp_path) == EXPECTED
  assert source.requests == [FIRST, SECOND, SECOND]


def test_another_file_of_the_same_name_is_kept(source, tmp_path):
  (tmp_path / NAMES[1]).write_text("my own")
  with pytest.raises(UserError, match=rf"{NAMES[1]}: is another file .*away"):
    get(source, tmp_path)
  assert (tmp_path / NAMES[1]).read_text() == "my own"


@pytest.mark.parametrize("fault", [1000, (503,), (429,), "stall"])
def test_transient_errors_are_retried(fault, source, tmp_path):
  source.faults = [fault]
  get(source, tmp_path, 2.0 if fault == "stall" else 600.0)
  assert files(tmp_path) == EXPECTED
  assert source.requests[:2] == [FIRST] * 2


def test_repeated_failure_leaves_no_partial_file(source, tmp_path):
  source.faults = [1000, 0, 500]
  with pytest.raises(UserError, match=r"after 3 attempts; run"):
    get(source, tmp_path)
  assert files(tmp_path) == {}
  get(source, tmp_path)
  assert files(tmp_path) == EXPECTED


def test_content_is_verified_not_its_compression(source, tmp_path):
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
  source.sent[FIRST], received = LIES[lie]
  with pytest.raises(UserError) as error:
    get(source, tmp_path)
  message = str(error.value)
  assert message.startswith(f"{NAMES[0]}: refused and removed; ")
  assert f"expected {sha256(TEXT)}, got {received}" in message
  assert files(tmp_path) == {}


def test_missing_file_is_not_retried(source, tmp_path):
  del source.sent[SECOND]
  with pytest.raises(UserError, match=rf"{SECOND}: HTTP 404 Not Found$"):
    get(source, tmp_path)
  assert source.requests == [FIRST, SECOND]
  assert files(tmp_path) == {NAMES[0]: EXPECTED[NAMES[0]]}


def test_unreachable_server_is_one_line(source, tmp_path):
  with socket.socket() as taken:  # bound, and nobody listens
    taken.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(UserError) as error:
      fetch(CORPUS, tmp_path, base_url=url, retries=2)
  assert str(error.value).startswith(f"{url}{FIRST}: Connection refused, after")
  assert "\n" not in str(error.value)
  assert files(tmp_path) == {}


@pytest.mark.parametrize("url", ["ftp://x", "file:///etc", "x", "https:/x"])
def test_only_http_and_https_are_accepted(url, tmp_path):
  with pytest.raises(UserError, match=rf"--base_url={url}: must begin with"):
    fetch(CORPUS, tmp_path / "new", base_url=url)
  assert files(tmp_path) == {}


@pytest.mark.parametrize("url", ["http://[", "http://x:y", "http://"])
def test_invalid_address_is_refused(url, tmp_path):
  with pytest.raises(UserError, match="is no valid address"):
    fetch(CORPUS, tmp_path, base_url=url)


@pytest.mark.parametrize("scheme", ["ftp", "file"])
def test_redirection_to_another_scheme_is_refused(
  scheme, source, tmp_path, monkeypatch
):
  def redirect(handler):
    handler.send_response(302)
    handler.send_header("Location", f"{scheme}://127.0.0.1:1/x")
    handler.end_headers()

  monkeypatch.setattr(Handler, "do_GET", redirect)
  with pytest.raises(UserError, match=rf"No connection adapters .*{scheme}://"):
    get(source, tmp_path)


def test_directory_that_is_a_file_is_refused(source, tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"file: is a file; must be a directory"):
    get(source, tmp_path / "file")
  with pytest.raises(UserError, match=r"folder: cannot be written \(Not a"):
    get(source, tmp_path / "file" / "folder")
  assert source.requests == []


def test_full_disk_is_one_line(source, tmp_path, monkeypatch):
  fail_while_writing(OSError(errno.ENOSPC, "No space left"), monkeypatch)
  with pytest.raises(UserError, match=r"cannot be written \(No space left\)"):
    get(source, tmp_path)
  assert files(tmp_path) == {}


def test_interrupted_download_leaves_no_partial_file(
  source, tmp_path, monkeypatch
):
  fail_while_writing(KeyboardInterrupt(), monkeypatch)
  with pytest.raises(KeyboardInterrupt):
    get(source, tmp_path)
  assert files(tmp_path) == {}


def fail_while_writing(error, monkeypatch):
  """Makes the first download raise an error after it wrote some bytes."""

  def download(_, url, output, store):
    pathlib.Path(output).write_bytes(b"half")
    raise error

  monkeypatch.setattr(pooch.HTTPDownloader, "__call__", download)


def test_unknown_corpus_lists_the_known_ones():
  with pytest.raises(
    UserError, match=r"^unknown corpus 'multi31k'; known: multi30k$"
  ):
    registry.find_corpus("multi31k")
  assert registry.find_corpus("multi30k") is registry.CORPORA["multi30k"]


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


def test_binary_reports_files_and_the_next_command(source, tmp_path):
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  folder = tmp_path / "my data"
  with start_tiny(source, folder, **pipes) as process:
    out, error = process.communicate(timeout=600)
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
    out, error = process.communicate(timeout=600)
  assert error.splitlines() == [f"{name}: already there" for name in EXPECTED]


def test_terminal_shows_a_progress_bar(source, tmp_path):
  leader, follower = pty.openpty()
  termios.tcsetwinsize(follower, (40, 120))
  with start_tiny(source, tmp_path, stderr=follower) as process:
    assert process.wait(600) == 0
  os.close(follower)
  shown = os.read(leader, 100_000).decode(errors="replace")
  os.close(leader)
  assert "%|" in shown
  assert "B/s]" in shown
  assert f"{NAMES[1]}: fetched" in shown


MISTAKES = {
  "nothing": ([], "missing CORPUS and DIR; give CORPUS DIR (see --help)"),
  "no directory": (["multi30k"], "missing DIR; give CORPUS DIR (see --help)"),
  "a third": (["multi30k", "{tmp}", "now"], "unknown argument 'now'; flags"),
  "unknown flag": (["multi30k", "{tmp}", "--base=x"], "base"),
  "not writable": (["multi30k", "/proc/x"], "/proc/x: cannot be written"),
  "no such files": (
    ["multi30k", "{tmp}", "--base_url={url}"],
    "/data/task1/raw/train.en.gz: HTTP 404 Not Found",
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_usage_error_is_one_message(mistake, source, tmp_path):
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


def test_help_names_the_arguments_and_needs_no_jax(tmp_path):
  (tmp_path / "jax.py").write_text("raise ImportError('jax was imported')")
  path = f"{tmp_path}{os.pathsep}{processes.ROOT}"
  _, out, error = processes.run("download", "--help", PYTHONPATH=path)
  assert "jax was imported" not in out + error
  for needed in ("CORPUS DIR", "multi30k", "--base_url"):
    assert needed in out
