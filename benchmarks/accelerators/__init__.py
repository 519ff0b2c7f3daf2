"""Compiles the library and the experiments for TPUs and GPUs.

No accelerator is needed, and nothing is run: the figures are counted in the
compiled programs.

- `attention_cases`: scores, masks, biases and derivatives on one device.
- `small_cases`: small calls beside `jax.nn`'s.
- `step_cases`: the steps of the configs on one device.
- `layout_cases`: a training step on many devices.
- `worker`: compiles cases in another process, which may crash.
- `report`: the JSON file and the table.
"""
