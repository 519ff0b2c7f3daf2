"""The page of a run's attention weights, from the command line."""

import json
import re

import pytest

from tests.experiments import processes, version_1


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  return version_1.extract(tmp_path_factory.mktemp("runs")) / "translation"


def sentences(page):
  (data,) = re.findall(r'id="data">(.*)</script>', page.read_text("utf-8"))
  return json.loads(data)["sentences"]


@pytest.mark.exhaustive
def test_runs_are_shown_side_by_side_on_the_lines_of_a_file(workdir, tmp_path):
  source, target = tmp_path / "lines.en", tmp_path / "lines.de"
  source.write_text("a dog runs\n\ntwo men\nthe girl\n")
  target.write_text("ein Hund läuft\n\nzwei Männer\ndas Kind\n", "utf-8")
  page = tmp_path / "folder" / "page.html"
  _, error = processes.succeeded(
    "explore",
    f"--workdir={workdir}",
    f"--workdir={workdir}",
    f"--source={source}",
    f"--target={target}",
    f"--out={page}",
    "--num_sentences=2",
  )
  assert "the page shows 2 of 3 lines" in error
  first, second = sentences(page)
  assert (first["text"], second["text"]) == ("a dog runs", "two men")
  assert [pair["run"] for pair in first["pairs"]] == [str(workdir)] * 2
  assert first["pairs"][0]["target"] == ["_ein", "_Hund", "_läuft", "</s>"]


@pytest.mark.exhaustive
def test_all_targets_of_a_repeated_source_are_shown(tmp_path):
  source, target = tmp_path / "source.txt", tmp_path / "target.txt"
  source.write_text("1 2\n1 2\n")
  target.write_text("2 1\n1 2\n")
  page = tmp_path / "page.html"
  processes.succeeded(
    "explore",
    "--workdir=releases/reverse",
    f"--source={source}",
    f"--target={target}",
    f"--out={page}",
  )
  (sentence,) = sentences(page)
  targets = [pair["target"][:2] for pair in sentence["pairs"]]
  assert targets == [["2", "1"], ["1", "2"]]


def test_runs_of_different_tasks_are_refused(tmp_path):
  error = processes.refused(
    "explore",
    "--workdir=releases/numbers",
    "--workdir=releases/reverse",
    f"--out={tmp_path}/page.html",
  )
  assert error.startswith(
    "error: --workdir: the runs have different tasks: releases/numbers has"
    " numbers, releases/reverse has reverse; "
  )


def test_a_wrong_symbol_is_named_with_its_line(tmp_path):
  source = tmp_path / "lines.txt"
  source.write_text("1 2\n\n1 99\n")
  error = processes.refused(
    "explore",
    "--workdir=releases/reverse",
    f"--source={source}",
    f"--out={tmp_path}/page.html",
  )
  assert error.startswith(
    f"error: --source={source}, '1 99': '99' is no symbol of reverse; "
  )


@pytest.mark.exhaustive
def test_without_a_file_the_validation_set_is_shown(workdir, tmp_path):
  page = tmp_path / "page.html"
  processes.succeeded(
    "explore", f"--workdir={workdir}", f"--out={page}", "--num_sentences=3"
  )
  assert len(sentences(page)) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "--workdir"),
    (["--workdir={run}", "--target=x"], "--target needs --source"),
    (["--workdir={run}", "--source={tmp}/blank"], "has no text"),
    (["--workdir={tmp}/none"], "not a run directory"),
  ],
)
def test_invalid_flags_print_one_error_message(
  flags, message, workdir, tmp_path
):
  (tmp_path / "blank").write_text("\n")
  error = processes.refused(
    "explore",
    f"--out={tmp_path / 'page.html'}",
    *(flag.format(run=workdir, tmp=tmp_path) for flag in flags),
  )
  assert message in error
