"""Translation end to end: a run on numbers, and the binaries that use it."""

import gzip
import json
import os
import random
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from experiments.data.text import numbers
from tests.experiments import processes

CONFIG = """
from configs import base, numbers

def get_config(arg=""):
  config = numbers.get_config(arg)
  config.data.update(num_shapes=1, max_length=24)
  config.data.train = base.digits(1, 3, 700)
  config.data.splits = {
    "validation": base.digits(1, 3, 40),
    "test": base.digits(1, 3, 40),
  }
  config.model.update(
    embedding_size=32, hidden_size=64, attention_size=32, bidirectional=False
  )
  config.optimizer.learning_rate = 1.5e-2
  config.train.update(
    steps=160, batch_size=256, eval_every=80, checkpoint_every=40, keep_last=2
  )
  config.evaluation.checkpoint = "last:2"
  return config
"""


# A trained model for numbers of up to twelve digits, which reads 95 tokens.
RELEASE = processes.ROOT / "releases/numbers"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run on numbers of up to three digits, English to Korean."""
  folder = tmp_path_factory.mktemp("numbers")
  config = processes.write_config(folder, CONFIG)
  processes.succeeded(
    "train", f"--config={config}", f"--workdir={folder / 'run'}"
  )
  return folder / "run"


def translate(workdir, text, *flags):
  """Runs `experiments.translate`; returns output lines and standard error."""
  out, error = processes.succeeded(
    "translate", f"--workdir={workdir}", *flags, text=text
  )
  return out.split("\n")[:-1], error


@pytest.mark.exhaustive
def test_unseen_numbers_are_translated_correctly(workdir):
  results = json.loads((workdir / "eval" / "test.json").read_text())
  assert results["metrics"]["sequence_accuracy"] > 0.95
  assert results["metrics"]["chrf"] > 95
  assert results["checkpoint"] == "mean of 2 steps, 120 to 160"
  assert "tok:char" in results["signatures"]["bleu"]
  assert sum(row["count"] for row in results["by_length"]) == 40
  for name in ("bleu", "chrf", "perplexity", "sequence_accuracy"):
    assert all(name in row for row in results["by_length"])


def test_line_i_of_thousands_is_the_translation_of_line_i():
  draw = random.Random(0)
  wanted = [draw.randrange(1, 1000) for _ in range(1200)]
  wanted = [None if draw.random() < 0.1 else number for number in wanted]
  known = [number for number in wanted if number is not None]
  english = dict(zip(known, numbers.spelled(known, "en")))
  korean = dict(zip(known, numbers.spelled(known, "ko")))
  text = "".join(f"{english.get(number, ' ')}\n" for number in wanted)
  lines, _ = translate(RELEASE, text)
  assert len(lines) == len(wanted)
  assert all((line == "") == (n is None) for line, n in zip(lines, wanted))
  right = [line == korean[n] for line, n in zip(lines, wanted) if n is not None]
  assert np.mean(right) > 0.95


@pytest.mark.exhaustive
def test_translation_of_a_file_continues(workdir, tmp_path):
  source, out = tmp_path / "source.txt", tmp_path / "out.txt"
  blank = b"\n" * 4095  # with the first line, what is translated together
  source.write_bytes(b"one\n" + blank + b"two\n\xff\n")
  begun = source.stat()
  flags = f"--workdir={workdir}", f"--source={source}", f"--out={out}"
  flags = *flags, f"--alignments={tmp_path / 'figures'}"
  error = processes.refused("translate", *flags)
  assert f"{source}, line 4098: not UTF-8" in error
  assert not out.exists()
  (hidden,) = tmp_path.glob(".out.txt.*.partial")
  (first,) = numbers.spelled([1], "ko")
  assert hidden.read_text() == f"{first}\n" + "\n" * 4095
  hidden.write_text("kept" + "\n" * 4096)
  source.write_bytes(b"one\n" + blank + b"two\n \n")
  os.utime(source, ns=(begun.st_atime_ns, begun.st_mtime_ns))
  code, printed, error = processes.run("translate", *flags)
  assert (code, printed) == (0, ""), error
  (second,) = numbers.spelled([2], "ko")
  assert out.read_text() == "kept" + "\n" * 4096 + f"{second}\n\n"
  assert f"wrote 4098 lines to {out}\n" in error
  assert not hidden.exists()
  page = (tmp_path / "figures" / "index.html").read_text("utf-8")
  assert '"text": "one"' in page
  assert (tmp_path / "figures" / "004097.png").exists()


def test_sigterm_reports_the_lines_that_a_restart_keeps(tmp_path):
  source, out = tmp_path / "source.txt", tmp_path / "out.txt"
  source.write_text("one\n" * 4096 * 40)
  flags = f"--workdir={RELEASE}", f"--source={source}", f"--out={out}"
  process = processes.start("translate", *flags)
  while not any(path.stat().st_size for path in tmp_path.glob(".out.txt.*")):
    assert process.poll() is None, process.communicate()
    time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  _, error = process.communicate(timeout=600)
  assert process.returncode == 75, error
  (hidden,) = tmp_path.glob(".out.txt.*.partial")
  count = hidden.read_text().count("\n")
  assert f"stopped after {count} lines; the same command continues" in error


def test_a_pipe_of_packed_lines_is_translated_to_a_file(tmp_path):
  pipe, out = tmp_path / "source.gz", tmp_path / "out.txt"
  os.mkfifo(pipe)
  content = gzip.compress(b"one\n\ntwo\n")
  threading.Thread(target=pipe.write_bytes, args=[content], daemon=True).start()
  processes.succeeded(
    "translate", f"--workdir={RELEASE}", f"--source={pipe}", f"--out={out}"
  )
  first, second = numbers.spelled([1, 2], "ko")
  assert out.read_text() == f"{first}\n\n{second}\n"


def test_a_line_typed_in_a_terminal_gets_its_translation_and_no_bar():
  ours, theirs = os.openpty()
  os.write(ours, b"one\n\x04")  # Ctrl-D
  process = processes.Forked(
    "experiments.translate",
    [f"--workdir={RELEASE}"],
    cwd=processes.ROOT,
    env=processes.environment(),
    **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
  )
  assert process.wait(timeout=600) == 0
  shown = os.read(ours, 10_000).decode()
  os.close(ours)
  os.close(theirs)
  (translation,) = numbers.spelled([1], "ko")
  assert shown.split("\r\n")[-2:] == [translation, ""]
  assert "line/s" not in shown


def test_warnings_name_the_line():
  text = f"nine\n\nseven zebras\n{'one ' * 100}\n"
  lines, error = translate(RELEASE, text)
  assert lines[:2] == ["구", ""]
  assert len(lines) == 4
  assert "line 3: not in the training text: zebras" in error
  assert "line 4: 100 tokens, the model reads 95" in error


@pytest.mark.exhaustive
def test_every_truncated_line_is_named_after_many_warnings(workdir):
  text = "seven zebras\n" * 11 + f"{'one ' * 40}\n"
  lines, error = translate(workdir, text)
  assert len(lines) == 12
  assert error.count("not in the training text: zebras") == 10
  assert (
    "and 1 more line with characters that are not in the training text" in error
  )
  assert "line 12: 40 tokens, the model reads 23" in error


@pytest.mark.exhaustive
def test_samples_depend_on_the_line_and_the_seed(workdir):
  flags = ("--temperature=3", "--top_k=9", "--seed=4")
  text = "nine hundred and one\n" * 5000
  lines, _ = translate(workdir, text, *flags)
  assert len({tuple(lines[i : i + 40]) for i in range(0, 5000, 40)}) == 125
  again, _ = translate(workdir, text, *flags)
  assert again == lines


@pytest.mark.exhaustive
def test_length_and_repetition_constraints_are_kept(workdir):
  lines, _ = translate(
    workdir, "nine\n", "--min_length=6", "--no_repeat_ngram=1"
  )
  assert len(lines[0]) >= 5
  assert len(set(lines[0])) == len(lines[0])


@pytest.mark.exhaustive
def test_closed_pipe_prints_no_traceback(workdir):
  flag = f"--workdir={workdir}"
  with processes.start("translate", flag, stdin=True) as process:
    process.stdout.close()
    process.stdin.write("nine\n" * 9000)
    process.stdin.close()
    error = process.stderr.read()
  assert process.returncode == 141
  assert "Traceback" not in error


@pytest.mark.exhaustive
def test_long_lines_and_invalid_utf8_are_refused(workdir):
  long = f"nine\n{'one ' * 40}\n"
  for text, flag, message in (
    (long, "--long_lines=refuse", "error: line 2: 40 tokens"),
    ("nine\n\udcff\n", "--long_lines=cut", "standard input, line 2: not UTF-8"),
  ):
    error = processes.refused(
      "translate", f"--workdir={workdir}", flag, text=text
    )
    assert message in error


@pytest.mark.exhaustive
def test_n_best_and_alignments_of_input_without_a_final_newline(
  workdir, tmp_path
):
  lines, _ = translate(
    workdir,
    "nine hundred and one\n\nseven",
    "--n_best=3",
    f"--alignments={tmp_path / 'figures'}",
  )
  numbers_out, scores, texts = zip(*(line.split("\t") for line in lines))
  assert "".join(numbers_out) == "111222333"
  assert texts[3:6] == ("", "", "")
  scores, texts = scores[:3], texts[:3]
  assert list(map(float, scores)) == sorted(map(float, scores), reverse=True)
  assert texts[0] == "구백일"
  assert len(set(texts)) == 3
  assert (tmp_path / "figures" / "000001.png").stat().st_size > 1000
  assert (tmp_path / "figures" / "000003.png").exists()
  assert not (tmp_path / "figures" / "000002.png").exists()
  page = (tmp_path / "figures" / "index.html").read_text("utf-8")
  assert '"text": "nine hundred and one"' in page
  assert '"text": "seven"' in page
  saved = np.load(tmp_path / "figures" / "000001.npz", allow_pickle=False)
  assert saved["weights"].shape[1] == 4 + 1  # its characters, and the end
  np.testing.assert_allclose(saved["weights"].sum(-1), 1, atol=1e-5)


def test_a_run_is_not_evaluated_if_results_cannot_be_written(tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(RELEASE, workdir)
  (workdir / "eval").write_text("")  # not a folder
  error = processes.refused("evaluate", f"--workdir={workdir}")
  assert error.startswith(f"error: --workdir={workdir}: cannot be written (F")


@pytest.mark.exhaustive
def test_two_files_are_evaluated_like_a_set(workdir, tmp_path):
  wanted = list(range(100, 1000, 9))
  for language in ("en", "ko"):
    lines = "".join(f"{line}\n" for line in numbers.spelled(wanted, language))
    (tmp_path / f"own.{language}").write_text(lines, encoding="utf-8")
  out, _ = processes.succeeded(
    "evaluate",
    f"--workdir={workdir}",
    "--beam_size=3",
    f"--source={tmp_path / 'own.en'}",
    f"--target={tmp_path / 'own.ko'}",
  )
  assert "chrF" in out
  path = workdir / "eval" / "own.en_beam_3.json"  # the config's is greedy
  assert f"results: {path}\n" in out
  results = json.loads(path.read_text())
  predictions = path.with_suffix(".txt").read_text("utf-8").splitlines()
  right = np.mean(
    [a == b for a, b in zip(predictions, numbers.spelled(wanted, "ko"))]
  )
  assert results["metrics"]["sequence_accuracy"] == pytest.approx(right)
  assert right > 0.9
  assert results["search"] == {"beam_size": 3, "length_penalty": 1.0}


@pytest.mark.exhaustive
def test_blank_and_long_lines_of_a_file_are_reported(workdir, tmp_path):
  (tmp_path / "own.en").write_text(f"nine\n\n{'one ' * 40}\n")
  (tmp_path / "own.ko").write_text("구\n\n일\n", encoding="utf-8")
  out, _ = processes.succeeded(
    "evaluate",
    f"--workdir={workdir}",
    f"--source={tmp_path / 'own.en'}",
    f"--target={tmp_path / 'own.ko'}",
  )
  assert (
    "1 of 3 pairs are longer than the model reads, and were truncated" in out
  )
  predictions = (workdir / "eval" / "own.en.txt").read_text("utf-8").split("\n")
  assert predictions[:2] == ["구", ""]


@pytest.mark.exhaustive
def test_a_file_named_like_a_set_is_refused(workdir, tmp_path):
  path = tmp_path / "test"
  path.write_text("nine\n")
  error = processes.refused(
    "evaluate", f"--workdir={workdir}", f"--source={path}", f"--target={path}"
  )
  assert "'test' is the name of one of the run's sets" in error


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--n_best=3", "--beam_size=2"], "--n_best=3: needs a --beam_size"),
    *(
      pytest.param(flags, message, marks=pytest.mark.exhaustive)
      for flags, message in (
        (
          ["--temperature=1", "--beam_size=2"],
          "--beam_size=2: sampling has no",
        ),
        (["--temperature=1", "--n_best=2"], "--n_best=2: sampling has no beam"),
        (["--top_k=3"], "--top_k=3: has no effect without sampling"),
        (["--out=a"], "--out: needs --source, the file that a restart reads"),
        (["--source=no"], "--source=no: cannot be read (No such file or dir"),
        (["--seed=3"], "--seed=3: has no effect without sampling"),
        (["--alignments=/dev/null"], "/dev/null: File exists"),
        (["--min_length=99"], "--min_length=99: must be less than"),
        (["--max_length=99"], "--max_length=99: the model was built for at"),
      )
    ),
  ],
)
def test_invalid_flags_print_one_error_message(flags, message):
  code, _, error = processes.run("translate", f"--workdir={RELEASE}", *flags)
  assert code == (1 if "/dev" in message else 2)
  assert message in error
  assert "Traceback" not in error


@pytest.mark.exhaustive
def test_an_unknown_checkpoint_is_refused(workdir):
  flags = f"--workdir={workdir}", "--checkpoint=last:0"
  error = processes.refused("translate", *flags)
  assert "--checkpoint=last:0: must be last, best" in error
