"""Exports are read without this package, and give the same predictions."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from ml_collections import ConfigDict

import experiments
from experiments import inference, run_directory
from experiments.checkpoints import parameter_file
from experiments.errors import UserError
from experiments.inference import export
from experiments.run_directory import read_config
from experiments.training.loop import train_and_evaluate
from tests.experiments import processes, version_1
from tests.experiments.processes import environment

SOURCES = ["1 2 3", "5 4"]
# Reads the folder that the first argument names, with NumPy alone.
PARAMETERS = """
import json, sys
from safetensors.numpy import load_file
folder = sys.argv[1]
params = load_file(f"{folder}/parameters.safetensors")
config = json.load(open(f"{folder}/config.json"))
sums = {name: float(array.sum()) for name, array in params.items()}
assert not {"experiments", "attention", "jax"} & sys.modules.keys()
print(json.dumps([config["data"]["name"], sums]))
"""
# Decodes the token ids of the second argument greedily, with JAX, without those
# of the third.
DECODING = """
import json, sys
import jax
import numpy as np
from jax import export
from safetensors.numpy import load_file
folder = sys.argv[1]
params = load_file(f"{folder}/parameters.safetensors")
sizes = json.load(open(f"{folder}/decoding.json"))
start, step = (
  export.deserialize(bytearray(open(f"{folder}/{name}.jax", "rb").read())).call
  for name in ("start", "step")
)
source = np.array(json.loads(sys.argv[2]), np.int32)
token = np.full(sizes["batch_size"], sizes["start_of_sentence"], np.int32)
state, tokens = start(params, source), []
for _ in range(sizes["target_length"]):
  state, logits, weights = step(params, state, token)
  logits = np.array(logits)
  special = [sizes["padding"], sizes["start_of_sentence"]]
  logits[:, special + json.loads(sys.argv[3])] = -np.inf
  token = logits.argmax(-1).astype(np.int32)
  tokens.append(token.tolist())
assert not {"experiments", "attention", "flax"} & sys.modules.keys()
print(json.dumps([tokens, weights.shape]))
"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  return version_1.extract(tmp_path_factory.mktemp("runs")) / "reverse"


@pytest.fixture(scope="module")
def restored(workdir):
  return inference.restore(workdir)


@pytest.fixture(scope="module")
def folder(restored, workdir, tmp_path_factory):
  folder = tmp_path_factory.mktemp("export") / "run"
  export.export_parameters(restored, workdir, folder)
  return folder


def without_package(program, *arguments):
  """Runs a program that has no path to this package."""
  done = subprocess.run(
    [sys.executable, "-c", program, *map(str, arguments)],
    env=environment() | {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"},
    cwd="/",
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_parameters_are_read_with_numpy_alone(folder, restored):
  name, sums = without_package(PARAMETERS, folder)
  assert name == "reverse"
  assert sums == {
    path: pytest.approx(float(np.sum(leaf)), rel=1e-4, abs=1e-6)
    for path, leaf in parameter_file.named(restored.params).items()
  }


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("name", "sources", "heads"),
  [("reverse", SOURCES, 1), ("translation", ["a dog runs", "two men"], 2)],
)
def test_the_decoder_is_called_with_jax_alone(
  name, sources, heads, workdir, tmp_path
):
  restored = inference.restore(workdir.parent / name)
  export.export_parameters(restored, workdir.parent / name, tmp_path)
  export.export_decoding(restored, export.Shapes(2, 6, 5), tmp_path)
  data = restored.experiment.data
  tokens = np.zeros((2, 6), int)
  for row, encoded in zip(tokens, data.source_tokens(sources)):
    row[: len(encoded) + 1] = [*encoded, 2]
  banned = [3] if name == "translation" else []  # its unknown token
  predicted, weights = without_package(
    DECODING, tmp_path, tokens.tolist(), banned
  )
  assert weights == [2, heads, 6]
  run = experiments.load(tmp_path)
  assert data.target_text(np.transpose(predicted)) == run.translate(
    sources, beam_size=1, max_length=5
  )


def test_an_export_is_used_like_its_run(folder, workdir, restored):
  again = inference.restore(folder)
  assert again.checkpoint == restored.checkpoint == "step 12"
  assert read_config(folder) == read_config(workdir)
  jax.tree.map(np.testing.assert_array_equal, again.params, restored.params)
  with pytest.raises(UserError, match="leave out --checkpoint"):
    inference.restore(folder, "last")


def test_an_export_is_not_a_directory_to_train_in(folder):
  config = ConfigDict(read_config(folder).model_dump())
  files = sorted(folder.iterdir())
  with pytest.raises(UserError, match="is an export, which has no training"):
    train_and_evaluate(config, folder)
  assert sorted(folder.iterdir()) == files


def test_a_folder_with_files_is_not_overwritten(folder, workdir, restored):
  with pytest.raises(UserError, match="has files; use another folder"):
    export.export_parameters(restored, workdir, folder)


def test_sizes_above_those_of_the_model_are_refused(restored, tmp_path):
  with pytest.raises(UserError, match="the model was built for at most 7"):
    export.export_decoding(restored, export.Shapes(1, 99, 5), tmp_path)


@pytest.mark.exhaustive
def test_nothing_is_written_for_sizes_above_those_of_the_model(tmp_path):
  error = processes.refused(
    "export",
    "--workdir=releases/reverse",
    f"--out={tmp_path}/out",
    "--source_length=999",
  )
  assert "the model was built for at most" in error
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda arrays: arrays.pop("output/bias"), "lacks output/bias"),
    (
      lambda arrays: arrays.update(more=np.zeros(2, np.float32)),
      "has more, unknown to it",
    ),
    (
      lambda arrays: arrays.update({"output/bias": np.zeros(2, np.float32)}),
      r"output/bias has shape \(2,\), not \(9,\)",
    ),
  ],
)
def test_parameters_of_another_model_are_refused(
  change, message, folder, restored, tmp_path
):
  arrays, _ = parameter_file.read(folder / run_directory.PARAMETERS)
  change(arrays)
  path = tmp_path / run_directory.PARAMETERS
  path.write_bytes(safetensors.numpy.save(arrays))
  like = restored.experiment.abstract_state.params
  with pytest.raises(UserError, match=message):
    parameter_file.restore(path, like)
  path.write_bytes(b"no parameters")
  with pytest.raises(UserError, match="cannot be read"):
    parameter_file.restore(path, like)
