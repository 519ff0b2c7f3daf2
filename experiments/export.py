r"""Writes a trained run as files that need neither this package nor Orbax.

    python -m experiments.export --workdir=runs/numbers --out=exported

Writes parameters.safetensors (the parameters without the optimizer's state),
config.json, the tokenizers and the evaluation sets. `--workdir=exported` of the
other commands reads them. With --source_length it also writes the decoder for
CPU, CUDA and TPU, as functions of `jax.export`.
"""

from absl import flags

from experiments import cli
from experiments.distributed import initialize
from experiments.errors import UserError
from experiments.run_directory import run_path

_WORKDIR, _CHECKPOINT = cli.define_run()
_OUT = flags.DEFINE_string(
  "out",
  None,
  "The folder to write, or its URL: a new or empty one.",
  required=True,
)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size",
  None,
  "Sources of the exported decoder; by default one.",
  lower_bound=1,
)
_SOURCE_LENGTH = flags.DEFINE_integer(
  "source_length",
  None,
  "Number of tokens of a source of the exported decoder, with the end of"
  " sentence and padding; by default no decoder is exported.",
  lower_bound=1,
)
_TARGET_LENGTH = flags.DEFINE_integer(
  "target_length",
  None,
  "Largest number of steps of the exported decoder; by default that of"
  " --source_length.",
  lower_bound=1,
)


def main() -> None:
  """Exports the run that the flags name."""
  initialize.set_up_jax()
  from experiments import inference
  from experiments.inference import export

  workdir, out = run_path(_WORKDIR.value), run_path(_OUT.value)
  shapes = None
  if _SOURCE_LENGTH.value:
    shapes = export.Shapes(
      _BATCH_SIZE.value or 1,
      _SOURCE_LENGTH.value,
      _TARGET_LENGTH.value or _SOURCE_LENGTH.value,
    )
  elif _BATCH_SIZE.value or _TARGET_LENGTH.value:
    raise UserError(
      "--batch_size and --target_length are sizes of the exported decoder; give"
      " --source_length too"
    )
  restored = inference.restore(workdir, _CHECKPOINT.value)
  if shapes:
    export.check_shapes(restored, shapes)
  export.export_parameters(restored, workdir, out)
  if shapes:
    export.export_decoding(restored, shapes, out)
  print(out)


if __name__ == "__main__":
  cli.run(main)
