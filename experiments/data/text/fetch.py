"""Downloads public corpora with pooch and verifies their content."""

import gzip
import hashlib
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pooch
import requests
from absl import logging
from requests.exceptions import InvalidSchema, InvalidURL

from experiments.data.text.registry import CorpusFile, PublicCorpus
from experiments.errors import UserError

# HTTP statuses after which the same request may succeed.
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


def fetch(
  corpus: PublicCorpus,
  directory: Path,
  *,
  base_url: str | None = None,
  timeout: float = 30.0,
  retries: int = 4,
) -> None:
  """Downloads the files of a corpus that a directory does not have yet."""
  base_url = base_url or corpus.base_url
  if not base_url.startswith(("http://", "https://")):
    raise UserError(
      f"--base_url={base_url}: must begin with http:// or https://"
    )
  if directory.exists() and not directory.is_dir():
    raise UserError(f"{directory}: is a file; must be a directory")
  pooch.get_logger().setLevel("WARNING")
  names = [file.name for file in corpus.files]
  store = pooch.create(
    directory,
    base_url,
    # The content is verified below: pooch would verify the packed bytes.
    registry=dict.fromkeys(names),
    urls={
      file.name: f"{base_url.rstrip('/')}/{file.path}" for file in corpus.files
    },
    retry_if_failed=retries,
  )
  try:
    directory.mkdir(parents=True, exist_ok=True)
    for file in corpus.files:
      _fetch_file(store, directory / file.name, file, timeout)
  except OSError as error:
    path = error.filename or directory
    raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def _fetch_file(
  store: pooch.Pooch, path: Path, file: CorpusFile, timeout: float
) -> None:
  """Downloads one file unless it is present."""
  if path.exists():
    digest = _content_sha256(path, file)
    if digest != file.sha256:
      raise UserError(
        f"{path}: is another file (SHA-256 of its content: expected"
        f" {file.sha256}, got {digest}); move it away"
      )
    logging.info("%s: already there", file.name)
    return
  try:
    store.fetch(file.name, downloader=_downloader(file, timeout))
  except requests.RequestException as error:
    raise UserError(
      f"{store.get_url(file.name)}: {_reason(error)}, after"
      f" {store.retry_if_failed + 1} attempts; run the same command again later"
    ) from error
  logging.info("%s: fetched, %s bytes", file.name, f"{path.stat().st_size:,}")


def _downloader(
  file: CorpusFile, timeout: float
) -> Callable[[str, str, pooch.Pooch], None]:
  """Returns pooch's downloader with a check of the content."""
  download = pooch.HTTPDownloader(
    progressbar=sys.stderr.isatty(),
    chunk_size=1 << 16,
    timeout=timeout,
    headers={"Accept-Encoding": "identity"},
  )

  def downloader(url: str, output: str, store: pooch.Pooch) -> None:
    # pooch's temporary file is private; a new one has the user's permissions.
    Path(output).unlink()
    try:
      download(url, output, store)
    except (InvalidURL, InvalidSchema) as error:
      raise UserError(f"{url}: is no valid address ({error})") from error
    except requests.RequestException as error:
      status = getattr(error.response, "status_code", None)
      # pooch tries again after a request error, not after a UserError.
      if status and status not in _TRANSIENT:
        raise UserError(f"{url}: {_reason(error)}") from error
      logging.warning("%s: %s", file.name, _reason(error))
      raise
    digest = _content_sha256(Path(output), file)
    if digest != file.sha256:
      raise UserError(
        f"{file.name}: refused and removed; SHA-256 of its content: expected"
        f" {file.sha256}, got {digest}, from {url}"
      )

  return downloader


def _content_sha256(path: Path, file: CorpusFile) -> str:
  """Returns the hash of a file's decompressed content, or why it has none."""
  open_file = gzip.open if file.name.endswith(".gz") else open
  try:
    with open_file(path, "rb") as content:
      return hashlib.file_digest(content, "sha256").hexdigest()
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    return f"none ({error})"


def _reason(error: requests.RequestException) -> str:
  """Returns the HTTP status, or the error of the operating system."""
  if error.response is not None:
    return f"HTTP {error.response.status_code} {error.response.reason}"
  system = re.search(r"\[Errno -?\d+\] ([^'\")]+)", str(error))
  return system[1] if system else str(error)
