"""The command that makes a router, and the record of the command that made the shipped one."""

import json
from typing import Any

import pytest

from bench import make_router
from calibrator_service.calibration.spec import published_spec, source_record
from shared.ladder.folder import read_ladder, read_router_folder
from tests.manifests import real_manifest
from tests.worker import build_model, build_tokenizer


def test_the_shipped_router_names_a_command_that_the_tree_has():
    check_record(real_manifest()["calibration"])


def check_record(calibration: dict[str, Any]) -> None:
    """The recorded command line is one that the program takes, and asks for the calibration that the manifest
    describes."""
    assert calibration["made_by"]["program"] == make_router.PROGRAM
    argv = calibration["made_by"]["argv"]
    options = make_router.parser().parse_args([*argv, "--work-dir", "work"])
    if options.prompts:
        options.prompts = make_router.TREE / options.prompts
    assert make_router.recorded_argv(options) == argv
    spec = make_router.spec_of(options)
    asked = json.loads(json.dumps(published_spec(spec, source_record(spec.source))))
    # Builds differ in the fields that specs have.
    known = asked.keys() & calibration["spec"].keys()
    assert {"source", "max_tokens", "time_budget_s"} <= known
    assert {name: calibration["spec"][name] for name in known} == {n: asked[n] for n in known}


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        ([], []),
        (["--hours", "2", "--nice", "0", "--out", "there"], ["--hours", "2.0"]),
        (["--tokens", "3_000_000"], ["--tokens", "3000000"]),
        (["--prompts", "/elsewhere/mine.jsonl"], ["--prompts", "mine.jsonl"]),
        (
            ["--prompts", str(make_router.TREE / "bench/data/spec_bench_dev.jsonl"), "--seed", "3"],
            ["--prompts", "bench/data/spec_bench_dev.jsonl", "--seed", "3"],
        ),
    ],
)
def test_the_record_has_what_decides_the_router_and_no_folders(given, recorded):
    where = ["--model", "/elsewhere/model", "--model-id", "tiny", "--work-dir", "/elsewhere"]
    options = make_router.parser().parse_args([*where, *given])
    argv = make_router.recorded_argv(options)
    assert argv == ["--model", "tiny", "--model-id", "tiny", *recorded]
    again = make_router.parser().parse_args([*argv, "--work-dir", "work"])
    assert make_router.recorded_argv(again) == argv


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ([], (0, 8 * 3600.0)),
        (["--hours", "0.5"], (0, 1800.0)),
        (["--tokens", "900"], (900, None)),
        (["--tokens", "900", "--hours", "1"], (900, 3600.0)),
    ],
)
def test_time_or_tokens_limit_it(given, limits):
    options = make_router.parser().parse_args(["--model", "m", "--work-dir", "w", *given])
    spec = make_router.spec_of(options)
    assert (spec.max_tokens, spec.time_budget_s) == limits


@pytest.mark.full
def test_it_makes_a_router_and_a_second_run_continues_from_the_work_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_router, "TREE", tmp_path)  # where the record looks for the prompts
    model = tmp_path / "model"
    build_model().save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"say {number}" for number in range(40)))
    out = tmp_path / "router"
    argv = ["--model", str(model), "--model-id", "tiny", "--prompts", str(prompts), "--nice", "0"]
    argv += ["--tokens", "600", "--max-new-tokens", "16", "--work-dir", str(tmp_path / "work")]
    make_router.main([*argv, "--out", str(out)])
    manifest, _ = read_router_folder(out)
    check_record(manifest["calibration"])
    other = {**manifest["calibration"]["spec"], "max_tokens": 601}
    with pytest.raises(AssertionError):
        check_record({**manifest["calibration"], "spec": other})
    assert str(tmp_path) not in json.dumps(manifest)
    assert read_ladder(out).model.model_id == "tiny"
    assert "learned from " in capsys.readouterr().out
    text = sorted((tmp_path / "work").rglob("selfgen-*"))
    assert text
    written = [path.stat().st_mtime_ns for path in text]
    make_router.main([*argv, "--out", str(tmp_path / "again")])
    assert [path.stat().st_mtime_ns for path in text] == written
    again = read_router_folder(tmp_path / "again")[0]
    assert again["calibration"]["tokens"] == manifest["calibration"]["tokens"]
