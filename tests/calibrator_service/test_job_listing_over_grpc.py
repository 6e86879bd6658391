"""Lists of jobs, and records that cannot be read."""

import pytest
from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2 as pb

from shared.errors import AlreadyExists, Corrupt
from tests.calibrator_service.conftest import error_of, rewrite


def test_listing_pages_and_filters(start_service):
    service = start_service("--model", "tiny=/a", "--model", "other=/b")
    service.wait_for(service.create("wait", "blocker"), pb.PHASE_COLLECTING)
    ids = [service.create("wait", str(n), model_id="other").calibration_id for n in range(3)]
    page = service.calibrations.ListCalibrations
    first = page(pb.ListCalibrationsRequest(model_id="other", page_size=2))
    assert [job.calibration_id for job in first.calibrations] == [ids[2], ids[1]]
    token = first.next_page_token
    rest = page(pb.ListCalibrationsRequest(model_id="other", page_size=2, page_token=token))
    assert [job.calibration_id for job in rest.calibrations] == [ids[0]]
    assert rest.next_page_token == ""
    assert len(page(pb.ListCalibrationsRequest(page_size=2**31 - 1)).calibrations) == 4
    error = error_of(lambda: page(pb.ListCalibrationsRequest(page_token=token)))
    assert error.reason == "BAD_PAGE_TOKEN", "of another request"


@pytest.mark.full
def test_lists_have_no_prompts_and_end_at_a_number_of_bytes(start_service, tmp_path):
    """Three jobs whose prompts together are larger than a message may be, and then records that are large
    themselves."""
    service = start_service("--model", "tiny=/a")
    service.wait_for(service.create("wait", "blocker"), pb.PHASE_COLLECTING)
    prompts = [f"{number} " + "x" * 100_000 for number in range(60)]
    source = pb.SelfGenerated(prompts=prompts)
    jobs = [service.create(request_id=str(n), self_generated=source) for n in range(3)]
    listed = service.calibrations.ListCalibrations(pb.ListCalibrationsRequest(), timeout=60)
    assert [job.num_prompts for job in listed.calibrations] == [60, 60, 60, 1]
    assert listed.ByteSize() < 4000
    with NeapClient(service.target) as client:
        whole = client.get_calibration(jobs[0].calibration_id)
    assert list(whole.spec.self_generated.prompts) == prompts
    again = service.create(request_id="0", self_generated=source)
    assert (again.calibration_id, again.num_prompts) == (jobs[0].calibration_id, 60)
    others = pb.SelfGenerated(prompts=[*prompts[1:], "another"])
    error = error_of(lambda: service.create(request_id="0", self_generated=others))
    assert isinstance(error, AlreadyExists)
    database = tmp_path / "calibrator" / "jobs.db"
    for job in jobs[:2]:
        rewrite(database, job.calibration_id, failure_reason="A")
        rewrite(database, job.calibration_id, state="failed", failure_message="x" * 1_500_000)
    request, sizes = pb.ListCalibrationsRequest(), []
    while not sizes or request.page_token:
        page = service.calibrations.ListCalibrations(request, timeout=60)
        sizes.append(len(page.calibrations))
        request.page_token = page.next_page_token
    assert sizes == [2, 2]


@pytest.mark.full
def test_unreadable_records_do_not_hide_other_jobs(service):
    """Records as after a downgrade, of a queued and of an ended job."""
    blocker = service.create("wait", "blocker")
    service.wait_for(blocker, pb.PHASE_COLLECTING)
    bad = {name: service.create("", name).calibration_id for name in ("queued", "succeeded")}
    good = service.create("", "good")
    service.kill()
    database = service.folder / "calibrator" / "jobs.db"
    for state, calibration_id in bad.items():
        rewrite(database, calibration_id, state=state, spec=b"\n\x04tiny\x12\x00\xaa\x06\x00")
    service.start()
    cancel = pb.CancelCalibrationRequest(calibration_id=blocker.calibration_id)
    service.calibrations.CancelCalibration(cancel, timeout=60)
    assert service.end_of(good).state == pb.STATE_SUCCEEDED
    listed = service.calibrations.ListCalibrations(pb.ListCalibrationsRequest(), timeout=60)
    assert [job.calibration_id for job in listed.calibrations] == [good.calibration_id, blocker.calibration_id]
    assert [job.calibration_id for job in listed.unreadable] == list(reversed(bad.values()))
    assert {job.reason for job in listed.unreadable} == {"JOB_UNREADABLE"}
    states = {job.calibration_id: job.state for job in listed.unreadable}
    assert states[bad["queued"]] == pb.STATE_FAILED, "the queue has ended it and gone on"
    assert states[bad["succeeded"]] == pb.STATE_SUCCEEDED
    for calibration_id in bad.values():
        job = pb.Calibration(calibration_id=calibration_id)
        for call in (lambda job=job: service.get(job), lambda job=job: list(service.watch(job))):
            error = error_of(call)
            assert (type(error), error.reason) == (Corrupt, "JOB_UNREADABLE")
    page = pb.ListCalibrationsRequest(page_size=2)
    paged = service.calibrations.ListCalibrations(page, timeout=60)
    assert len(paged.calibrations) + len(paged.unreadable) == 2
    assert paged.next_page_token
