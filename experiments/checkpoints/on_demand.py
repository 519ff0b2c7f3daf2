"""Opens a run's checkpoints when they are first needed."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.config import TrainConfig


@contextlib.contextmanager
def opened_on_demand(
  workdir: Path, config: TrainConfig
) -> Iterator[Callable[[], Any]]:
  """Yields a function that opens the checkpoints when it is first called."""
  with contextlib.ExitStack() as stack:

    @functools.cache
    def manager() -> Any:
      # Orbax takes half a second to import, and a new run needs it late.
      from experiments.checkpoints.manager import opened

      return stack.enter_context(opened(workdir, config))

    yield manager
