r"""Says on paper which layouts of a config keep how many accelerators busy.

    python -m experiments.plan --config=configs/multi30k.py
    python -m experiments.plan --config=configs/multi30k.py \
        --config.model.model_size=2048 --config.model.feed_forward_size=8192 \
        --config.model.num_heads=32 --accelerator=v5p --length=512

Nothing is trained and no data is read. The products and the traffic of an
update are counted in its own program (see docs/scaling.md), and divided by
what the makers publish of their devices and links.
"""

from absl import flags

from experiments import cli, runtime

_CONFIG = cli.define_config()
_ACCELERATOR = flags.DEFINE_string(
  "accelerator", "h100", "What to compute on: a100, h100, h200, v5e or v5p."
)
_DEVICES = flags.DEFINE_list(
  "devices", ["8", "64", "512", "4096"], "How many of them, a list."
)
_LENGTH = flags.DEFINE_integer(
  "length",
  None,
  "Tokens of every source and of every target; by default the longest of the"
  " config's data.",
  lower_bound=2,
)
_TOKENS = flags.DEFINE_integer(
  "tokens",
  None,
  "Tokens of an update, sources and targets together; by default as many as"
  " the config's batches have.",
  lower_bound=2,
)
_SHARE = flags.DEFINE_float(
  "share",
  0.5,
  "Of its peak that a device reaches while it computes.",
  lower_bound=0.01,
  upper_bound=1.0,
)


def _counts(words: list[str]) -> list[int]:
  from experiments.errors import UserError

  for word in words:
    if not word.strip().isdecimal() or int(word) < 1:
      raise UserError(
        f"--devices: got {word!r}; give whole numbers, as in --devices=8,64"
      )
  return [int(word) for word in words]


def main() -> None:
  """Prints the table, as the flags say."""
  runtime.set_up_jax()
  from experiments import accelerators, costs, estimates, schema

  config = schema.parse(_CONFIG.value.to_dict())
  accelerator = accelerators.accelerator(_ACCELERATOR.value)
  devices = _counts(_DEVICES.value)
  length = _LENGTH.value or config.data.max_length
  update = costs.update_of(config, length)
  if _TOKENS.value:
    num_rows = _TOKENS.value / (2 * length)
  elif config.train.batch_unit == "tokens":
    num_rows = config.train.batch_size / length
  else:
    num_rows = config.train.batch_size
  measures = {"num_rows": num_rows, "share": _SHARE.value}
  print(*estimates.assumptions(update, accelerator, **measures), sep="\n")
  print()
  table = estimates.table(update, accelerator, devices, **measures)
  print(*table, sep="\n")


if __name__ == "__main__":
  cli.run(main, config="config")
