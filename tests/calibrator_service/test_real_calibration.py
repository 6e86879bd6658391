"""Jobs that run the real pipeline, on a tiny random model saved to disk."""

import json
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from neap_client.calibration.v1 import calibration_pb2 as pb
from typer.testing import CliRunner

from calibrator_service import recipe
from calibrator_service.calibration import plan
from calibrator_service.calibration.spec import CalibrationSpec, SelfGenerated
from calibrator_service.calibration.statistics import Statistics, read_statistics
from calibrator_service.spec_messages import spec_from_proto
from neap_engine.cli.main import app
from shared.calibrator_settings import CalibratorSettings
from shared.errors import Cancelled, InvalidInput, UnsupportedModel
from shared.ladder.artefact import unpack_ladder
from shared.ladder.blob_names import STATISTICS_BLOB
from shared.registry.factory import open_registry
from tests.calibrator_service.conftest import Service
from tests.families import VOCABULARY_SIZE
from tests.registry_damage import content_path
from tests.small_disk import run_on_small_disk
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

JOB_TIMEOUT_S = 240
PHASES = ("loading", "collecting", "training_heads", "evaluating", "publishing")
# A job's first phases are short: these begin in its process' start, in imports, and in loading.
START_DELAYS_S = (0.0, 0.3, 1.0, 2.0)
PROMPTS = [" ".join(f"w{number + at}" for at in range(2, 8)) for number in range(40)]


def run(source: Path, spec: CalibrationSpec, work_dir: Path, *, stop: bool = False, **options: str) -> recipe.Product:
    """The work of a job, in this process."""
    settings = CalibratorSettings(models=f"tiny={source}", **options)
    return recipe.run(spec, settings, work_dir, None, lambda _: None, lambda: stop)


def real_job(service: Service, request_id: str = "one") -> pb.Calibration:
    """It stops itself in the phase that the file "stop-in" names."""
    return service.create(
        request_id=request_id,
        max_tokens=4000,
        exit_depths=[2],
        self_generated=pb.SelfGenerated(prompts=["real", *PROMPTS], max_new_tokens=24),
        draft_vocabulary_size=64,
    )


def test_killed_in_each_phase_it_resumes_and_publishes_one_ladder(start_service, model_folder, tmp_path):
    stop_in = tmp_path / "stop-in"
    stop_in.write_text(PHASES[0])
    service = start_service("--model", f"tiny={model_folder}", "--threads", "1")
    job = real_job(service)
    for following in (*PHASES[1:], "none"):
        service.stopped_job()
        stop_in.write_text(following)
        service.kill()
        wait_until(lambda: not service.job_processes())
        service.start()
    seen = list(service.watch(job, JOB_TIMEOUT_S))
    end = seen[-1]
    assert end.state == pb.STATE_SUCCEEDED, end.failure
    assert (end.num_resumes, service.record(job)["num_deaths"]) == (len(PHASES), 0)
    assert len(service.versions()) == 1
    phases = [now.phase for now in seen if now.state == pb.STATE_RUNNING]
    assert phases == sorted(phases)
    registry = open_registry(str(tmp_path / "registry"))
    made = registry.resolve("tiny", "latest")
    assert made.manifest_digest == end.manifest_digest
    blobs = {name: registry.read_blob(made, name) for name in made.manifest["blobs"]}
    ladder = unpack_ladder(made.manifest, blobs)
    # A random model's exit may agree no more often than its commonest token.
    left_out = made.manifest["calibration"]["left_out"]
    assert [exit_.name for exit_ in ladder.exits] + list(left_out) == ["depth-2"]
    assert made.manifest["model"]["num_layers"] == 6


def test_terminated_while_a_job_starts_it_counts_no_death(start_service, model_folder):
    service = start_service("--model", f"tiny={model_folder}", "--threads", "1")
    job = real_job(service)
    for delay_s in START_DELAYS_S:
        wait_until(lambda: service.record(job)["state"] == "running")
        time.sleep(delay_s)
        assert service.terminate() == 0
        assert not service.job_processes()
        service.start()
    end = service.end_of(job, JOB_TIMEOUT_S)
    assert end.state == pb.STATE_SUCCEEDED, end.failure
    assert service.record(job)["num_deaths"] == 0
    assert len(service.versions()) == 1


def test_a_disk_that_is_full_to_its_last_byte_loses_no_job(model_folder, tmp_path):
    """FULL_DISK_S: how long nothing is free, if neither the job ends nor anything waits visibly; then in every phase of
    a job."""
    phases = PHASES if "FULL_DISK_S" in os.environ else ("collecting", "publishing")
    script = Path(__file__).with_name("full_disk.py")
    (tmp_path / "disk").mkdir()
    command = (sys.executable, script, tmp_path / "disk", model_folder, *phases)
    said = run_on_small_disk(tmp_path / "disk", "96m", *command, timeout_s=800)
    ends = [json.loads(line) for line in said.splitlines()]
    print(ends)
    assert [end["phase"] for end in ends] == list(phases)
    for end in ends:
        assert end["is_listed"], end
        assert (end["state"], end["reason"]) in (("SUCCEEDED", ""), ("FAILED", "DISK_FULL")), end
        assert (end["next"], end["num_processes"]) == ("SUCCEEDED", 0), end
        assert end["num_succeeded"] == end["num_whole_versions"], end
    assert (ends[-1]["state"], ends[-1]["num_resumes"]) == ("SUCCEEDED", 0), "it waited for room"


def test_a_request_without_limits_gets_the_quick_budget(model_folder, tmp_path, monkeypatch):
    """From the proto to the manifest, as the job's process would; the preset is shortened for the test."""
    monkeypatch.setattr(plan, "QUICK_BUDGET_S", 8.0)
    request = pb.CalibrationSpec(model_id="tiny", self_generated=pb.SelfGenerated())
    calibration = run(model_folder, spec_from_proto(request), tmp_path).manifest["calibration"]
    assert calibration["spec"]["time_budget_s"] == 8.0
    assert calibration["spec"]["max_tokens"] == 0


def test_products_are_rounded_as_the_settings_say(model_folder, tmp_path):
    spec = CalibrationSpec("tiny", SelfGenerated(max_new_tokens=24), max_tokens=2000)
    formats = {"dtype": "bfloat16", "compute_dtype": "bfloat16"}
    manifest = run(model_folder, spec, tmp_path, **formats).manifest
    assert manifest["calibration"]["relaxed"]["engine"]["compute_dtype"] == "bfloat16"


def test_model_and_dataset_that_do_not_exist(start_service, model_folder, tmp_path, monkeypatch):
    """The Hub cannot be reached (offline mode): the job fails and uses no other text."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    service = start_service(
        *("--model", f"tiny={model_folder}", "--model", f"missing={tmp_path / 'nowhere'}"), real=True
    )
    hub = pb.HubDataset(name="nobody/no-such-dataset")
    jobs = {
        ("MODEL_NOT_FOUND",): service.create(model_id="missing", request_id="1"),
        ("DATASET_NOT_FOUND", "DATASET_UNAVAILABLE"): service.create(hub_dataset=hub, request_id="2"),
    }
    for reasons, job in jobs.items():
        end = service.end_of(job, JOB_TIMEOUT_S)
        assert end.state == pb.STATE_FAILED
        assert end.failure.reason in reasons, end.failure
    assert open_registry(str(tmp_path / "registry")).list_versions("tiny") == []


def test_unsupported_model_proposer_too_deep_and_cancellation(model_folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    spec = CalibrationSpec("tiny", SelfGenerated(), max_tokens=1000)
    with pytest.raises(UnsupportedModel):
        run(tmp_path, spec, tmp_path)
    with pytest.raises(InvalidInput) as raised:
        run(model_folder, replace(spec, exit_depths=(6,)), tmp_path)
    assert raised.value.reason == "EXIT_TOO_DEEP"
    with pytest.raises(Cancelled):
        run(model_folder, spec, tmp_path, stop=True)


def answers_of(path: Path, *seeds: int) -> str:
    """Lines of text and answers: for each seed twenty, a multiple of the pattern of splits."""
    lines = []
    for seed in seeds:
        draw = random.Random(seed)
        for _ in range(20):
            prompt, answer = ([draw.randrange(2, VOCABULARY_SIZE) for _ in range(n)] for n in (6, 24))
            lines.append(json.dumps({"prompt": prompt, "answer": answer}))
    path.write_text("\n".join(lines))
    return str(path)


def test_a_child_through_grpc_has_the_sums_of_everything_at_once(start_service, model_folder, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    flags = ["--model", f"tiny={model_folder}", "--threads", "1", "--text-folder", str(texts)]
    service = start_service(*flags, real=True)

    def calibrated(request_id: str, *seeds: int, **options: Any) -> pb.Calibration:
        path = answers_of(texts / f"{request_id}.jsonl", *seeds)
        job = service.create(
            request_id=request_id, answer_file=pb.AnswerFile(path=path), max_tokens=5000, exit_depths=[2], **options
        )
        end = service.end_of(job, JOB_TIMEOUT_S)
        assert end.state == pb.STATE_SUCCEEDED, end.failure
        return end

    first = calibrated("first", 1)
    child = calibrated("child", 2, parent=pb.ParentRouter(alias="latest"))
    both = calibrated("both", 1, 2)
    assert child.spec.parent.version == first.router_version
    registry = open_registry(str(tmp_path / "registry"))

    def statistics(job: pb.Calibration) -> Statistics:
        made = registry.get("tiny", job.router_version)
        path = tmp_path / "statistics"
        path.write_bytes(registry.read_blob(made, STATISTICS_BLOB))
        return read_statistics(path)

    one, other = statistics(child), statistics(both)
    assert one.num_tokens == other.num_tokens
    assert torch.equal(one.choice_counts, other.choice_counts)
    for name in ("second", "targets"):
        own, all_at_once = (getattr(s.moments[2], name) for s in (one, other))
        torch.testing.assert_close(own, all_at_once, rtol=1e-3, atol=0.05)
    shown = CliRunner().invoke(
        app, ["routers", "show", str(child.router_version), "--model", "tiny", "--calibrator", service.target]
    )
    assert shown.exit_code == 0, shown.output
    line = shown.stdout.split("line, the youngest first\n")[1].split("\n")
    assert line[0].startswith(f"  version {child.router_version}, ")
    assert "tokens of AnswerFile sha256:" in line[0]
    assert line[1].startswith(f"  version {first.router_version}, ")
    # Damage to the parent is noticed by the child, which publishes nothing.
    made = registry.get("tiny", first.router_version)
    digest = made.manifest["blobs"][STATISTICS_BLOB]["digest"]
    (tmp_path / "registry" / content_path("blobs", digest)).write_bytes(b"?")
    path = answers_of(texts / "damaged.jsonl", 3)
    job = service.create(
        request_id="damaged",
        answer_file=pb.AnswerFile(path=path),
        max_tokens=5000,
        parent=pb.ParentRouter(version=first.router_version),
    )
    end = service.end_of(job, JOB_TIMEOUT_S)
    assert (end.state, end.failure.reason) == (pb.STATE_FAILED, "CORRUPT")
    assert len(registry.list_versions("tiny")) == 3
