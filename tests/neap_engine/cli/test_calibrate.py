import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from neap_engine.cli.console import print_line
from neap_engine.cli.job_progress import figures_line
from shared.errors import PermissionDenied
from shared.registry.factory import open_registry
from tests.waiting import wait_until

SHIPPED = Path(__file__).parents[3] / "bench" / "router"


@pytest.fixture
def calibrate(service, neap):
    """Runs `neap calibrate` with `flags`."""

    def run(*flags, before=(), **options):
        return neap(*before, "calibrate", "--model", "tiny", "--calibrator", service.address, *flags, **options)

    return run


def test_follows_the_job_to_its_version(service, calibrate):
    flags = ["--depths", "2,4", "--time-budget", "90", "--alias", "a"]
    result = calibrate(*flags)
    assert "collecting 25% 1,234 tokens read" in result.stdout
    assert "published version 7 (sha256:abc)" in result.stdout
    assert "answers 1.42 times as fast as full depth here" in result.stdout
    spec = service.calibration.spec
    assert list(spec.exit_depths) == [2, 4]
    assert spec.time_budget.seconds == 90
    assert list(spec.aliases) == ["a"]
    assert spec.WhichOneof("source") == "self_generated"


def test_limits_are_left_to_the_service_unless_given(service, calibrate):
    """The service knows the default budget. A request with --max-tokens carries no budget."""
    calibrate()
    assert service.calibration.spec.max_tokens == 0
    assert not service.calibration.spec.HasField("time_budget")
    calibrate("--max-tokens", "700000")
    assert service.calibration.spec.max_tokens == 700_000
    assert not service.calibration.spec.HasField("time_budget")


def test_a_preset_is_a_budget(service, calibrate):
    def budget_s(*flags: str) -> int:
        calibrate(*flags)
        return service.calibration.spec.time_budget.seconds

    assert budget_s("--preset", "quick") == 150
    assert budget_s("--preset", "hour") == 3600
    assert budget_s("--preset", "night", "--time-budget", "7000") == 7000


def test_a_time_budget_that_a_duration_cannot_hold_is_refused(service, calibrate):
    for budget, code in (("1e30", 1), ("nan", 2), ("inf", 1)):
        result = calibrate("--time-budget", budget, code=code)
        assert "--time-budget" in result.stderr
        assert service.calibration.spec is None


def test_output_to_a_file_has_one_line_per_tenth_of_the_work(service, calibrate):
    writing = {"state": pb.STATE_RUNNING, "phase": pb.PHASE_COLLECTING}
    done = service.calibration.states[-1]
    service.calibration.states = [
        {**writing, "fraction": f, "figures": {"generated_tokens": 64.0}} for f in (0.0, 0.01, 0.1)
    ] + [done]
    result = calibrate()
    said = [line.strip() for line in result.stdout.splitlines() if "collecting" in line]
    assert said == ["collecting 0% 64 tokens written", "collecting 10% 64 tokens written"]


def test_sources(service, calibrate, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\n two \n")
    calibrate("--prompts", str(prompts))
    assert list(service.calibration.spec.self_generated.prompts) == ["one", "two"]
    assert not service.calibration.spec.self_generated.use_workers
    calibrate("--prompts", str(prompts), "--workers")
    assert service.calibration.spec.self_generated.use_workers
    refused = calibrate("--text", "some.txt", "--workers", code=1)
    assert "--workers" in refused.stderr
    calibrate("--dataset", "org/set:conf", "--field", "body")
    assert service.calibration.spec.hub_dataset == pb.HubDataset(name="org/set", config="conf", field="body")
    calibrate("--text", "some.txt")
    assert service.calibration.spec.text_file.path.startswith("/")
    calibrate("--answers", "some.jsonl")
    assert service.calibration.spec.answer_file.path.endswith("/some.jsonl")
    result = calibrate("--text", "some.txt", "--dataset", "x", code=1)
    assert "only one of --text, --answers, --dataset, --prompts and --traffic" in result.stderr
    result = calibrate("--dataset", "a:b:c:d", code=1)
    assert "NAME[:CONFIG[:SPLIT]]" in result.stderr


def test_prompts_may_be_json(service, calibrate, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": " two\\nlines", "kind": "x"}\n\n{"prompt": "one"}')
    calibrate("--prompts", str(prompts))
    assert list(service.calibration.spec.self_generated.prompts) == [" two\nlines", "one"]
    for line in (
        "plain text",
        "[" * 100_000,
        "[1]",
        '{"text": "a"}',
        '{"prompt": 5}',
        '{"prompt": " "}',
        '{"prompt": "\\ud800"}',
    ):
        prompts.write_text('{"prompt": "one"}\n' + line)
        result = calibrate("--prompts", str(prompts), code=1)
        assert "prompts.jsonl:2" in result.stderr
        assert "[BAD_PROMPT_FILE]" in result.stderr


def test_only_a_line_feed_ends_a_prompt(service, calibrate, tmp_path):
    prompts = tmp_path / "prompts.txt"
    inner = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    prompts.write_bytes(f"\ufeff{inner}\r\ntwo\n".encode())
    calibrate("--prompts", str(prompts))
    assert list(service.calibration.spec.self_generated.prompts) == [inner, "two"]
    service.calibration.spec = None
    for content, reason in ((b"\xff\xfe", "NOT_UTF8"), (b" \n\n", "EMPTY_PROMPT")):
        prompts.write_bytes(content)
        result = calibrate("--prompts", str(prompts), code=1)
        assert reason in result.stderr
        assert service.calibration.spec is None


@pytest.mark.parametrize(("given", "nanoseconds"), [("1.9", 1_900_000_000), ("90.000000001", 90_000_000_001)])
def test_fractions_of_a_second_reach_the_service(service, calibrate, given, nanoseconds):
    calibrate("--time-budget", given)
    assert service.calibration.spec.time_budget.ToNanoseconds() == nanoseconds


def test_a_failed_job_says_why(service, calibrate):
    failure = pb.Failure(reason="DATASET_NOT_FOUND", message="no dataset x")
    service.calibration.states[-1] = {"state": pb.STATE_FAILED, "failure": failure}
    result = calibrate(code=1)
    assert "no dataset x [DATASET_NOT_FOUND]" in result.stderr


def test_control_characters_in_a_failure_are_escaped(service, calibrate):
    failure = pb.Failure(reason="BAD\x9b", message="no dataset \x1b]0;x\x07 [/red]")
    service.calibration.states[-1] = {"state": pb.STATE_FAILED, "failure": failure}
    service.calibration.states[1]["figures"] = {"\x1b[2J.agreement": 1.0, "\x1b[2J.positions": 800.0}
    result = calibrate(code=1)
    assert "no dataset \\u001b]0;x\\u0007 [/red] [BAD\\u009b]" in result.stderr
    assert "\\u001b[2J 100%" in result.stdout
    assert all(line.isprintable() for line in result.output.splitlines())


def ctrl_c():
    """As a terminal sends it: Python raises KeyboardInterrupt in the main thread, which runs the command."""
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_cancels_and_waits_for_the_end(service, calibrate):
    service.calibration.may_end.clear()
    service.calibration.on_watch = lambda: service.calibration.cancelled or ctrl_c()
    result = calibrate(code=1)
    assert service.calibration.cancelled
    assert "cancelling calibration job-1" in result.stderr
    assert "nothing was published" in result.stderr


def test_ctrl_c_is_caught_as_soon_as_the_id_is_printed(service, calibrate, monkeypatch):
    def printed_and_interrupted(text):
        print_line(text)
        if text == "calibration job-1":
            ctrl_c()

    monkeypatch.setattr("neap_engine.cli.calibrate.print_line", printed_and_interrupted)
    result = calibrate(code=1)
    assert service.calibration.cancelled
    assert "nothing was published" in result.stderr


def test_ctrl_c_before_the_service_answers_says_how_to_find_the_job(service, calibrate):
    tested, main = threading.Event(), threading.main_thread().ident

    def interrupt():
        # A signal that comes before the main thread waits would be seen when the call ends, half a minute later.
        wait_until(lambda: sys._current_frames()[main].f_code.co_name == "interruptible")
        ctrl_c()
        tested.wait()

    service.calibration.on_create = interrupt
    for flag in ("--seed=1", "--detach"):
        result = calibrate("--request-id", "r 1", flag, code=130)
        assert f"`neap jobs list --calibrator {service.address}`" in result.stderr
        assert "--request-id 'r 1'" in result.stderr
        assert not service.calibration.cancelled
    tested.set()


def test_a_second_ctrl_c_says_how_to_watch_the_job(service, calibrate, tmp_path):
    service.calibration.may_end.clear()
    service.calibration.on_watch = ctrl_c
    token = tmp_path / "my token"
    token.write_text("secret")
    result = calibrate(before=("--token-file", str(token)), code=130)
    watch = f"neap --token-file '{token}' jobs watch job-1 --calibrator {service.address}"
    assert f"`{watch}`" in result.stderr.replace("\n", " ")


def test_a_job_that_cannot_be_cancelled_goes_on(service, calibrate):
    service.calibration.cancel_error = PermissionDenied("not yours")
    service.calibration.on_watch = ctrl_c
    result = calibrate(code=1)
    assert "not yours [PERMISSION_DENIED]" in result.stderr
    assert "jobs watch job-1" in result.stderr


def test_detach_prints_the_id_alone(service, calibrate):
    watches = []
    service.calibration.on_watch = lambda: watches.append(1)
    result = calibrate("--detach")
    assert result.stdout == "job-1\n"
    assert f"`neap jobs watch job-1 --calibrator {service.address}`" in result.stderr
    assert service.calibration.spec.model_id == "tiny"
    assert watches == []


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--depths", "2,x"], 1),
        (["--seed", "-1"], 2),
        (["--time-budget", "0.5"], 2),
        (["--detach", "--start-service"], 2),
    ],
)
def test_invalid_flags_are_refused(service, calibrate, flags, code):
    calibrate(*flags, code=code)
    assert service.calibration.spec is None


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (
            {"generated_tokens": 1234.0, "tokens_per_s": 56.78, "tokens": 0.0},
            "1,234 tokens written, 56.8 tokens/s",
        ),
        (
            {"tokens": 900.0, "depth-0.loss": 3.0, "depth-2.agreement": 0.314, "depth-2.positions": 800.0},
            "agrees with the model on held-out positions: exit at depth 2 31%",
        ),
        (
            {
                "depth-0.agreement": 0.5,
                "depth-0.positions": 6.0,
                "prompt-lookup.agreement": 0.2,
                "prompt-lookup.positions": 800.0,
            },
            "agrees with the model on held-out positions: exit at depth 0 not known (only 6 positions), repeated text "
            "20%",
        ),
        ({}, ""),
    ],
)  # fmt: skip
def test_figures_are_shown_in_plain_words(figures, line):
    assert figures_line(pb.Calibration(figures=figures)) == line


def test_a_parent_is_a_version_or_an_alias(service, calibrate):
    calibrate()
    assert not service.calibration.spec.HasField("parent")
    calibrate("--from", "3")
    assert service.calibration.spec.parent == pb.ParentRouter(version=3, share=1.0)
    calibrate("--from", "stable", "--parent-share", "0.5")
    assert service.calibration.spec.parent == pb.ParentRouter(alias="stable", share=0.5)


@pytest.mark.parametrize("share", ["0", "1.5", "-1", "nan"])
def test_a_share_that_is_none_is_refused(service, calibrate, share):
    result = calibrate("--from", "3", "--parent-share", share, code=1)
    assert "--parent-share" in result.stderr
    assert service.calibration.spec is None


def test_a_parent_of_files_is_imported_and_named_by_its_digest(service, calibrate, tmp_path, monkeypatch):
    monkeypatch.setenv("NEAP_REGISTRY", str(tmp_path / "registry"))
    calibrate("--from", str(SHIPPED))
    made = open_registry(str(tmp_path / "registry")).get("tiny", 1)
    parent = pb.ParentRouter(version=1, manifest_digest=made.manifest_digest, share=1.0)
    assert service.calibration.spec.parent == parent
    assert open_registry(str(tmp_path / "registry")).aliases("tiny") == {}
    assert "manifest.json is missing" in calibrate("--from", str(tmp_path), code=1).stderr
