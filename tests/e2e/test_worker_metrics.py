"""A real worker's metrics, from its log line with the port to the end of the process."""

import signal

import pytest
from neap_client import NeapClient

from inference_service.servicer import SERVICE_NAME
from tests.exported_metrics import scraped
from tests.generation import request_of
from tests.worker_process import worker_process

pytestmark = [pytest.mark.e2e, pytest.mark.full]


def test_metrics_are_served_where_the_log_says_and_do_not_hold_up_the_end(folder, tmp_path):
    log = tmp_path / "log"
    flags = ("--metrics-listen", "127.0.0.1:0", "--grace-s", "0.1")
    with (
        log.open("wb") as stderr,
        worker_process(folder, tmp_path / "registry", *flags, stderr=stderr) as (process, address),
        NeapClient(address) as client,
    ):
        client.wait_ready(SERVICE_NAME)
        list(client.generate(request_of(9)))
        samples = scraped(log)
        assert samples["neap_generation_tokens_total", "tiny"] == 9
        assert samples["process_resident_memory_bytes",] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
