"""Errors on the command line: one message, an exit code, no traceback."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import jax
import pytest
from absl import flags
from ml_collections import config_flags

from experiments import cli
from experiments.config import flag, parse
from experiments.distributed import initialize
from experiments.errors import UserError
from tests.experiments import processes

pytestmark = [
  # by which ml_collections loads a config file
  pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
]

# The tests run on three devices, over which no default batch divides.
DIVIDES = "--config.train.batch_size=3"

ERRORS = {
  "no config": (["train"], "--config is required"),
  "no get_config": (["train", "--config={tmp}/empty.py"], "has no get_config"),
  "syntax error": (["train", "--config={tmp}/broken.py"], "broken.py"),
  "raises": (["train", "--config={tmp}/raises.py"], "raises.py, line 2"),
  "unknown argument": (
    ["train", "--config=configs/reverse.py:dott"],
    "error: --config=configs/reverse.py:dott: unknown argument 'dott' after the"
    " colon; known: none, dot, scaled_dot, general, additive, concat, cosine,"
    " location, local_m, local_p, transformer; did you mean 'dot'?",
  ),
  "exits in get_config": (
    ["train", "--config={tmp}/exits.py"],
    "exits.py, line 3: SystemExit: set DATA first",
  ),
  "empty config": (["train", "--config="], "--config=: give a config, as "),
  "folder as config": (
    ["train", "--config=configs"],
    "--config=configs: is a folder; give one of its files; existing files: ",
  ),
  "no Python file": (
    ["train", "--config=README.md"],
    "--config=README.md: a config is a Python file; existing files: configs/",
  ),
  "two configs": (
    [
      "train",
      "--config=configs/reverse.py",
      "--config=configs/copy.py",
      "--config.seed=1",
    ],
    "error: --config is given more than once; give one config",
  ),
  "misspelt field": (
    ["train", "--config=configs/reverse.py", "--config.train.step=3"],
    "config.train.step",
  ),
  "training an export": (
    ["train", "--config=configs/reverse.py:dot", "--workdir=releases/reverse"],
    "--workdir=releases/reverse: is an export",
  ),
  "comparing in a run": (
    [
      "compare",
      "--config=configs/reverse.py",
      "--scores=dot",
      "--workdir=releases/reverse",
    ],
    "--workdir=releases/reverse: is the run directory of one training",
  ),
  "temperature": (
    ["translate", "--workdir=releases/numbers", "--temperature=inf"],
    "--temperature=inf: must be 0 or a finite number of at least 0.0001",
  ),
  "length penalty": (
    ["translate", "--workdir=releases/numbers", "--length_penalty=nan"],
    "--length_penalty=nan: must be a finite number",
  ),
  "alignments": (
    ["translate", "--workdir=releases/numbers", "--alignments={tmp}/empty.py"],
    "--alignments={tmp}/empty.py: is a file; give the name of a folder",
  ),
  "page": (
    ["explore", "--workdir=releases/numbers", "--out={tmp}"],
    "--out={tmp}: is a folder; give the name of a page",
  ),
  "page in no folder": (
    ["explore", "--workdir={tmp}/none", "--out={tmp}/empty.py/page.html"],
    "error: --out={tmp}/empty.py/page.html: cannot be written (File exists)",
  ),
  "export to a file": (
    ["export", "--workdir=releases/numbers", "--out={tmp}/empty.py"],
    "--out={tmp}/empty.py: is a file; give the name of a folder",
  ),
  "topology": (
    ["plan", "--config=configs/reverse.py", "--topology=v5"],
    "--topology=v5: is no topology; write ",
  ),
  "returns a dictionary": (
    ["train", "--config={tmp}/dictionary.py"],
    "get_config returned dict, not an ml_collections.ConfigDict",
  ),
  "misspelt in the file": (
    ["train", "--config={tmp}/typo.py"],
    "config.train.stepz: no such field; did you mean 'steps'?",
  ),
  "misspelt value": (
    [
      "train",
      "--config=configs/reverse.py",
      "--config.model.normalizer=sofmax",
    ],
    "'stick_breaking'; did you mean 'softmax'?",
  ),
  "unknown flag": (
    ["train", "--config=configs/reverse.py", "--worddir=x"],
    "worddir",
  ),
  "stray word": (["train", "--config=configs/reverse.py", "fast"], "'fast'"),
  "not writable": (
    ["train", "--config=configs/reverse.py", DIVIDES, "--workdir=/proc/x"],
    "--workdir=/proc/x: cannot be written",
  ),
  "a file as workdir": (
    [
      "train",
      "--config=configs/reverse.py",
      DIVIDES,
      "--workdir={tmp}/empty.py",
    ],
    "{tmp}/empty.py: is a file, not a directory",
  ),
  "evaluate: a file as workdir": (
    ["evaluate", "--workdir={tmp}/empty.py"],
    "--workdir={tmp}/empty.py: is a file, not a directory",
  ),
  "export: sizes of no decoder": (
    ["export", "--workdir={tmp}", "--out={tmp}/out", "--batch_size=2"],
    "give --source_length too",
  ),
  "evaluate: a set and files": (
    ["evaluate", "--workdir=x", "--split=test", "--source=a", "--target=b"],
    "--split=test: has no effect with --source and --target; leave out",
  ),
  "evaluate: not a run": (
    ["evaluate", "--workdir={tmp}"],
    "not a run directory",
  ),
  **{
    f"{name}: no {flag}": ([name, *rest], f"error: --{flag} is required")
    for name, flag, *rest in (
      ("evaluate", "workdir"),
      ("compare", "workdir"),
      ("plan", "topology"),
      ("explore", "out", "--workdir=run"),
    )
  },
}


@pytest.mark.parametrize("kind", ERRORS)
def test_user_error_is_one_message_without_traceback(kind, tmp_path):
  (tmp_path / "empty.py").write_text("")
  (tmp_path / "broken.py").write_text("def get_config(:\n")
  (tmp_path / "raises.py").write_text("def get_config(arg=''):\n  1 / 0\n")
  (tmp_path / "exits.py").write_text(
    "import sys\ndef get_config(arg=''):\n  sys.exit('set DATA first')\n"
  )
  (tmp_path / "dictionary.py").write_text(
    "def get_config(arg=''):\n  return {'seed': 0}\n"
  )
  (tmp_path / "typo.py").write_text(
    "from configs import base\n"
    "def get_config(arg=''):\n"
    "  config = base.get_config(arg)\n"
    "  config.train.stepz = 3\n"
    "  return config\n"
  )
  arguments, message = ERRORS[kind]
  arguments = [each.format(tmp=tmp_path) for each in arguments]
  code, out, error = processes.run(*arguments, devices=3)
  assert code == 2, error
  assert message.format(tmp=tmp_path) in error
  assert "Traceback" not in error
  assert error.startswith("error: ")
  assert len(error.splitlines()) <= 4, error
  assert out == ""


@pytest.mark.parametrize(
  ("code", "start", "field"),
  [
    (
      "jnp.zeros(2**44) + 1",
      "error: a device has too little memory: Out of memory allocating",
      "--config.train.accumulation",
    ),
    (
      "np.empty(2**57)",
      "error: the machine has too little memory: Unable to allocate",
      "--config.train.batch_size",
    ),
  ],
)
def test_too_little_memory_is_one_message(code, start, field):
  script = (
    "import jax.numpy as jnp; import numpy as np; from experiments import cli\n"
    f"cli._guarded(lambda: {code}, [])"
  )
  done = subprocess.run(
    [sys.executable, "-c", script],
    capture_output=True,
    text=True,
    cwd=processes.ROOT,
    env=processes.environment(),
  )
  assert done.returncode == 1
  assert "Traceback" not in done.stderr
  assert done.stderr.startswith(start)
  assert field in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only on Linux")
def test_a_full_standard_output_is_one_message():
  script = "from experiments import cli; cli._guarded(lambda: print('x'), [])"
  with open("/dev/full", "w") as full:
    done = subprocess.run(
      [sys.executable, "-c", script],
      stdout=full,
      stderr=subprocess.PIPE,
      text=True,
      cwd=processes.ROOT,
      env=processes.environment(PYTHONUNBUFFERED=""),
    )
  assert done.returncode == 1
  assert done.stderr == (
    "error: a file or standard output: No space left on device\n"
  )


@pytest.mark.parametrize(
  ("address", "index", "message"),
  [
    ("host:1234", "2", "JAX_PROCESS_ID=2: must be at least 0 and less than"),
    ("host:1234", "one", "JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numb"),
    ("host", "0", "JAX_COORDINATOR_ADDRESS=host: must be host:port"),
    ("auto", "0", "JAX_COORDINATOR_ADDRESS=auto: JAX finds no cluster here"),
  ],
)
def test_impossible_addresses_of_processes_are_named(
  address, index, message, monkeypatch
):
  def detect():
    raise ValueError("coordinator_address should be defined.")

  monkeypatch.setattr(jax.distributed, "initialize", lambda **_: detect())
  monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
  monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
  monkeypatch.setenv("JAX_PROCESS_ID", index)
  with pytest.raises(UserError, match=message):
    initialize._connect(address)


@pytest.mark.parametrize(
  "error",
  [
    "RESOURCE_EXHAUSTED: Quota exceeded for the bucket",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem",
    "INTERNAL: out of memory",
  ],
)
def test_other_errors_are_not_of_a_device_s_memory(error):
  assert cli._memory_error(RuntimeError(error)) is None


def test_help_does_not_import_jax(tmp_path):
  # A broken jax on the path: importing it fails.
  (tmp_path / "jax.py").write_text("raise ImportError('jax was imported')")
  code, out, error = processes.run(
    "train", "--help", PYTHONPATH=f"{tmp_path}{os.pathsep}{processes.ROOT}"
  )
  assert "jax was imported" not in out + error
  assert code == 0
  assert "\n  --config: " in out
  for needed in ("--config", "--workdir", "configs/reverse.py", "resume"):
    assert needed in out


def test_the_default_workdir_is_named_after_config_and_argument(tmp_path):
  (tmp_path / "runs").write_text("")  # not a directory, so the run fails
  code, _, error = processes.run(
    "train", f"--config={processes.write_config(tmp_path)}:dot", cwd=tmp_path
  )
  assert code == 2
  assert "--workdir=runs/tiny-dot: cannot be written" in error


def parsed_config(*overrides, source="configs/reverse.py"):
  return parsed_flags(*overrides, source=source)["config"].value


def parsed_flags(*overrides, source="configs/reverse.py"):
  values = flags.FlagValues()
  arguments = [f"--config={source}", *overrides]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(flags, "FLAGS", values)
    patch.setattr(config_flags.config_flags, "FLAGS", values)
    patch.setattr(sys, "argv", ["train", *arguments])
    config_flags.DEFINE_config_file("config", flag_values=values)
    flag.install_parser()
    values(sys.argv)
    return values


def test_arguments_give_another_process_the_same_config(monkeypatch):
  section = {"short": {"min_length": 2, "max_length": 3, "num_examples": 4}}
  given = parsed_flags(f"--config.data.splits={section}", "--config.seed=7")
  monkeypatch.setattr(flags, "FLAGS", given)
  file, *overrides = flag.config_arguments()
  assert file == "--config=configs/reverse.py"
  again = parsed_config(*overrides)
  assert again.to_dict() == given["config"].value.to_dict()
  assert again.data.splits.short.max_length == 3


@pytest.mark.parametrize(
  ("file", "hint"),
  [
    ("configs/revrse.py", "did you mean configs/reverse.py?"),
    ("configs/copy", "did you mean configs/copy.py?"),
    ("configs.copy:dot", "did you mean configs/copy.py?"),
    ("copy.py", "did you mean configs/copy.py?"),
    (
      "configs/nope.py",
      "existing files: configs/copy.py, configs/lookup.py, configs/multi30k.py,"
      " configs/multi30k_small.py, configs/numbers.py, configs/reverse.py,"
      " configs/translation.py",
    ),
  ],
)
def test_a_config_file_that_does_not_exist_is_corrected(file, hint):
  with pytest.raises(UserError) as caught:
    parsed_config(source=file)
  path = file.partition(":")[0]
  assert str(caught.value) == f"--config={path}: no such file; {hint}"


@pytest.mark.parametrize(
  ("override", "message"),
  [
    ("train.steps=many", "must be an integer"),
    ("model.input_feeding=maybe", "must be true or false"),
    ("optimizer.learning_rate=fast", "must be a number"),
    ("model=foo", "is a section; set its fields, as --config.train.steps=100"),
    ("model=3", "is a section; set its fields, as --config.train.steps=100"),
  ],
)
def test_an_override_of_another_type_is_refused(override, message):
  with pytest.raises(flags.IllegalFlagValueError) as caught:
    parsed_config(f"--config.{override}")
  assert str(caught.value) == f"flag --config.{override}: {message}"


def test_a_section_is_overridden_by_a_dictionary():
  splits = {"validation": {"min_length": 1, "max_length": 2, "num_examples": 3}}
  config = parsed_config(f"--config.data.splits={splits}")
  assert config.to_dict()["data"]["splits"] == splits


def test_the_score_of_another_model_is_suggested():
  with pytest.raises(UserError) as caught:
    parsed_config("--config.model.score=dot")
  assert str(caught.value) == (
    "--config.model.score: no such field; did you mean 'attention'? The"
    " argument of a config also sets it: configs/reverse.py:dot"
  )
  with pytest.raises(UserError, match=r"did you mean 'score'\?$"):
    parsed_config(
      "--config.model.attention=dot", source="configs/reverse.py:transformer"
    )


@pytest.mark.parametrize(
  ("field", "arg", "rest"),
  [
    ("model.scan_layers", "", " of this model; a Transformer has it"),
    ("model.cell", ":transformer", " of this model; an RNN has it"),
    ("trian", "", "; did you mean 'train'?"),
    ("train.seed", "", "; did you mean --config.seed?"),
  ],
)
def test_the_place_or_name_of_a_field_is_suggested(field, arg, rest):
  with pytest.raises(UserError) as caught:
    parsed_config(f"--config.{field}=3", source=f"configs/reverse.py{arg}")
  assert str(caught.value) == f"--config.{field}: no such field{rest}"


def test_an_optional_field_accepts_none_and_a_number(tmp_path):
  config = parsed_config("--config.optimizer.clip_norm=None")
  assert parse(config.to_dict()).optimizer.clip_norm is None
  config = parsed_config("--config.optimizer.clip_norm=0.5")
  assert parse(config.to_dict()).optimizer.clip_norm == 0.5
  file = tmp_path / "none.py"
  file.write_text(
    "from configs import reverse\n"
    "def get_config(arg=''):\n"
    "  config = reverse.get_config(arg)\n"
    "  config.optimizer.clip_norm = None\n"
    "  return config\n"
  )
  config = parsed_config("--config.optimizer.clip_norm=2", source=file)
  assert parse(config.to_dict()).optimizer.clip_norm == 2.0


def test_none_for_a_required_field_is_rejected():
  config = parsed_config("--config.optimizer.learning_rate=None")
  with pytest.raises(UserError, match=r"learning_rate: got None; "):
    parse(config.to_dict())


LOGS = """
import logging, sys, warnings
from experiments import cli
cli.configure_logs()
sys.path.insert(0, sys.argv[1])
import library, orbax.checkpoint
warnings.warn("a user sees this")
warnings.warn("Some donated buffers were not usable: f32[2]")
record = logging.makeLogRecord
handler = library.logging.get_absl_handler()
for package, level in ((cli, 20), (orbax.checkpoint, 40)):
  handler.handle(record({
    "pathname": package.__file__, "levelno": level,
    "levelname": "INFO" if level == 20 else "ERROR",
    "msg": f"logged by {package.__name__}",
  }))
"""


def test_logs_and_warnings_of_libraries_are_hidden_by_their_package(tmp_path):
  """Not by a path that contains "experiments", as a checkout's may."""
  folder = tmp_path / "experiments" / "site-packages"
  folder.mkdir(parents=True)
  (folder / "library.py").write_text(
    "from absl import logging\n"
    "logging.warning('a warning of a library')\n"
    "logging.error('an error of a library')\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", LOGS, str(folder)],
    capture_output=True,
    text=True,
    cwd=processes.ROOT,
    env=processes.environment(),
    check=True,
  )
  assert "a warning of a library" not in done.stderr
  assert "an error of a library" in done.stderr
  assert "logged by experiments.cli" in done.stderr
  assert "logged by orbax" not in done.stderr
  assert "a user sees this" in done.stderr
  assert "donated" not in done.stderr


def test_the_compilation_cache_is_reduced_to_its_limit(tmp_path):
  for index in range(4):
    path = tmp_path / f"program{index}-cache"
    path.write_bytes(bytes(100))
    os.utime(path, (index, index))
  os.utime(tmp_path / "program0-cache", (9, 0))  # read recently
  initialize.reduce_cache(tmp_path, 250)
  assert {path.name[:8] for path in tmp_path.iterdir()} == {
    "program0", "program3",
  }  # fmt: skip
  initialize.reduce_cache(tmp_path / "none", 250)


SPLIT = "--xla_cpu_parallel_codegen_split_count=2"


@pytest.mark.parametrize(
  ("given", "plugins", "want"),
  [
    ("", (), f"--xla_backend_optimization_level=1 {SPLIT}"),
    (SPLIT, (), f"{SPLIT} --xla_backend_optimization_level=1"),
    ("--a=1", ("libtpu",), "--a=1"),
    ("", ("xla_rocm7",), ""),
    ("flags.txt", (), "flags.txt"),
    ("", ("xla_cuda13",), "--xla_gpu_deterministic_ops=true"),
    ("--a=1", ("xla_cuda12",), "--a=1 --xla_gpu_deterministic_ops=true"),
    *[
      (f"--xla_gpu_{own}", ("xla_cuda13",), f"--xla_gpu_{own}")
      for own in ("deterministic_ops=0", "exclude_nondeterministic_ops=1")
    ],
  ],
)
def test_xla_flags_are_set_for_the_platform_unless_the_user_decides(
  given, plugins, want, monkeypatch
):
  def find_plugins(group):
    assert group == "jax_plugins"
    names = set(plugins) - {"libtpu"}
    return [EntryPoint(name, f"jax_plugins.{name}", group) for name in names]

  monkeypatch.setattr(initialize, "entry_points", find_plugins)
  find_module = lambda name: name if name in plugins else None  # noqa: E731
  monkeypatch.setattr(initialize.importlib.util, "find_spec", find_module)
  monkeypatch.setenv("XLA_FLAGS", given)
  initialize._set_xla_flags()
  assert os.environ["XLA_FLAGS"] == want
