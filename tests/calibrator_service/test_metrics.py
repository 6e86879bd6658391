"""The metrics of the calibration service, scraped as Prometheus does."""

import re
from pathlib import Path

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service.job import Ended, JobState
from calibrator_service.job_process import JobFolder
from calibrator_service.metrics import CalibratorMetrics
from calibrator_service.supervisor import Supervisor
from shared.calibrator_settings import CalibratorSettings
from shared.errors import Exhausted
from tests.exported_metrics import scraped

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SPEC = pb.CalibrationSpec(model_id="tiny", self_generated=pb.SelfGenerated())


@pytest.mark.full
def test_a_service_counts_the_outcomes_of_its_jobs(start_service):
    service = start_service("--model", "tiny=/a", "--metrics-listen", "127.0.0.1:0")
    assert service.end_of(service.create("die-once")).state == pb.STATE_SUCCEEDED
    assert service.end_of(service.create("no-dataset", "two")).state == pb.STATE_FAILED
    service.wait_for(service.create("wait", "three"), pb.PHASE_COLLECTING)
    service.create("wait", "four")
    samples = scraped(service.folder / "service.log")
    for sample, value in {
        ("neap_calibration_jobs", "tiny", "succeeded"): 1,
        ("neap_calibration_jobs", "tiny", "failed"): 1,
        ("neap_calibration_jobs", "tiny", "running"): 1,
        ("neap_calibration_queue_length", "tiny"): 1,
        ("neap_calibration_progress_ratio", "tiny", "collecting"): 0.25,
        ("neap_calibration_process_deaths_total", "tiny"): 1,
        ("neap_calibration_resumes_total", "tiny"): 1,
        ("neap_calibration_publications_total", "tiny"): 1,
        ("neap_calibration_failures_total", "tiny", "DATASET_NOT_FOUND"): 1,
        ("neap_calibration_duration_seconds_count", "tiny", "succeeded"): 1,
        ("neap_calibration_duration_seconds_count", "tiny", "failed"): 1,
        ("neap_calibration_queue_up",): 1,
        ("neap_calibration_queue_held_up",): 0,
    }.items():
        assert samples.get(sample) == value, sample


def test_an_unreadable_store_hides_only_its_own_metrics(tmp_path, monkeypatch):
    metrics = CalibratorMetrics()
    supervisor = Supervisor(JobFolder(tmp_path), CalibratorSettings(), metrics=metrics)

    def full() -> None:
        raise Exhausted("full", reason="DISK_FULL")

    monkeypatch.setattr(supervisor.store, "count_jobs", full)
    names = {family.name for family in metrics.registry.collect()}
    assert "neap_calibration_queue_up" in names
    assert "neap_calibration_jobs" not in names
    supervisor.stop()


def test_the_document_explains_every_metric_and_its_labels(tmp_path):
    metrics = CalibratorMetrics()
    supervisor = Supervisor(JobFolder(tmp_path), CalibratorSettings(), metrics=metrics)
    job = supervisor.store.create("one", SPEC, max_queued=9)
    assert supervisor.store.claim() is not None
    ended = Ended(JobState.FAILED, "BECAUSE", "of that")
    metrics.count_ended_job(supervisor.store.record_end(job.calibration_id, ended))
    metrics.process_deaths.labels("tiny").inc()
    metrics.publications.labels("tiny").inc()
    metrics.served_reports.labels("taken").inc()
    metrics.verdicts.labels("tiny", "grow").inc()
    metrics.alarms.labels("tiny", "lost_acceptance").inc()
    supervisor.store.create("two", SPEC, max_queued=9)
    assert supervisor.store.claim() is not None
    exported = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            name = family.name if family.type == "histogram" else sample.name
            exported[name] = tuple(sorted(set(sample.labels) - {"le"}))
    rows = re.findall(r"^\| `(neap_(?:calibration|judge)_\w+)(?:\{([^}]*)\})?` \| .+? \|", DOCUMENT.read_text(), re.M)
    explained = {name: tuple(sorted(filter(None, labels.split(",")))) for name, labels in rows}
    assert explained == {n: labels for n, labels in exported.items() if n.startswith("neap_")}
    supervisor.stop()
