"""Files of public corpora, fetched and checked.

What has come of a file is kept in FILE.part, and the next attempt or the next
run goes on from there. A file gets its name when its content is known to be
the one expected, so that nothing half-written is ever read.
"""

import gzip
import hashlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from absl import logging
from tqdm import tqdm

from experiments.data.text.registry import CorpusFile, PublicCorpus
from experiments.errors import UserError

_BLOCK = 1 << 16
# Answers that may be another one in a moment.
_PASSING = (408, 425, 429, 500, 502, 503, 504)


class Patience(NamedTuple):
  """How long to wait for a source.

  Attributes:
    timeout: seconds without a byte, after which a connection is given up.
    delays: seconds before each further attempt.
  """

  timeout: float = 30.0
  delays: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)


def fetch(
  corpus: PublicCorpus,
  directory: Path,
  *,
  base_url: str | None = None,
  patience: Patience | None = None,
) -> None:
  """Fetches what a directory lacks of a corpus.

  Args:
    corpus: what to fetch.
    directory: where to, made if need be.
    base_url: of a mirror, instead of the corpus's own.
    patience: how long to wait for it.

  Raises:
    UserError: if a file cannot be had, is not the one expected, or cannot be
      written.

  Example:
    >>> fetch(CORPORA["multi30k"], Path("data"))  # doctest: +SKIP
  """
  base_url = base_url or corpus.base_url
  if not base_url.startswith(("http://", "https://")):
    raise UserError(
      f"--base_url={base_url}: must begin with http:// or https://"
    )
  if directory.exists() and not directory.is_dir():
    raise UserError(f"{directory}: is a file; must be a directory")
  try:
    directory.mkdir(parents=True, exist_ok=True)
    for file in corpus.files:
      url = f"{base_url.rstrip('/')}/{file.path}"
      _fetch_file(url, directory / file.name, file, patience or Patience())
  except OSError as error:
    place = error.filename or directory
    raise UserError(f"{place}: cannot be written ({error.strerror})") from None


class _BrokenError(Exception):
  """A connection failed, and another one may not."""


def _fetch_file(
  url: str, path: Path, file: CorpusFile, patience: Patience
) -> None:
  """Gives a file its name once its content is right."""
  if path.exists():
    found = _content_sha256(path, file)
    if found != file.sha256:
      raise UserError(
        f"{path}: is another file (SHA-256 of its content: expected"
        f" {file.sha256}, got {found}); move it away"
      )
    logging.info("%s: already there", file.name)
    return
  part = path.with_name(f"{file.name}.part")
  _complete(url, part, patience)
  found = _content_sha256(part, file)
  if found != file.sha256:
    part.unlink()
    raise UserError(
      f"{file.name}: refused and removed; SHA-256 of its content: expected"
      f" {file.sha256}, got {found}, from {url}"
    )
  part.replace(path)
  logging.info("%s: fetched, %s bytes", file.name, f"{path.stat().st_size:,}")


def _content_sha256(path: Path, file: CorpusFile) -> str:
  """The hash of what a file holds, or why there is none."""
  opened = gzip.open if file.name.endswith(".gz") else open
  try:
    with opened(path, "rb") as content:
      return hashlib.file_digest(content, "sha256").hexdigest()
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    return f"none ({error})"


def _complete(url: str, part: Path, patience: Patience) -> None:
  """Receives what is missing, in as many attempts as it may take."""
  for delay in (*patience.delays, None):
    try:
      return _receive(url, part, patience.timeout)
    except _BrokenError as error:
      if delay is None:
        raise UserError(
          f"{url}: {error}, after {len(patience.delays) + 1} attempts; the"
          " same command goes on from what has come"
        ) from None
      logging.warning("%s: %s; again in %g s", part.stem, error, delay)
      time.sleep(delay)


def _receive(url: str, part: Path, timeout: float) -> None:
  """Appends to a file what is missing, or as much of it as comes."""
  there = part.stat().st_size if part.exists() else 0
  with _answer(url, there, timeout) as answer:
    # A server that knows no ranges sends all of it, with status 200.
    resumed = answer.status == 206
    size = there if resumed else 0
    length = answer.headers["Content-Length"]
    total = size + int(length) if length else None
    with (
      _bar(part.stem, size, total) as bar,
      part.open("ab" if resumed else "wb") as file,
    ):
      for block in _blocks(answer):
        file.write(block)
        size += len(block)
        bar.update(len(block))
  if total is not None and size < total:
    raise _BrokenError(f"broke off after {size:,} of {total:,} bytes")


def _answer(url: str, start: int, timeout: float) -> http.client.HTTPResponse:
  """Asks for a file from a byte on."""
  headers = {"Range": f"bytes={start}-"} if start else {}
  try:
    request = urllib.request.Request(url, headers=headers)
    return _opener().open(request, timeout=timeout)
  except urllib.error.HTTPError as error:
    error.close()
    if error.code == 416 and start:  # there is nothing from that byte on
      return _answer(url, 0, timeout)
    reason = " ".join(f"HTTP {error.code} {error.reason}".split())
    if error.code in _PASSING:
      raise _BrokenError(reason) from None
    raise UserError(f"{url}: {reason}") from None
  except (ValueError, http.client.InvalidURL) as error:
    raise UserError(f"{url}: is no address ({error})") from None
  except (OSError, http.client.HTTPException) as error:
    raise _broken(error) from None


def _blocks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
  """What a server sends, as it comes: its errors are not those of a disk."""
  try:
    while block := answer.read1(_BLOCK):
      yield block
  except (OSError, http.client.HTTPException) as error:
    raise _broken(error) from None


def _broken(error: Exception) -> _BrokenError:
  reason = getattr(error, "reason", error)
  text = getattr(reason, "strerror", None) or str(reason)
  return _BrokenError(text or type(reason).__name__)


def _opener() -> urllib.request.OpenerDirector:
  """Follows http and https; urllib's own would follow to ftp as well."""
  opener = urllib.request.OpenerDirector()
  for handler in (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.UnknownHandler,
  ):
    opener.add_handler(handler())
  return opener


def _bar(name: str, size: int, total: int | None) -> tqdm:
  """A bar on a terminal; elsewhere the line said of each file has to do."""
  # Some recorders are terminals of no width.
  seen = sys.stderr.isatty() and os.get_terminal_size(2).columns > 0
  return tqdm(
    desc=name,
    initial=size,
    total=total,
    unit="B",
    unit_scale=True,
    leave=False,
    disable=not seen,
    dynamic_ncols=True,
  )
