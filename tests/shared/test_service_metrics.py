import socket
import threading
import urllib.error
import urllib.request
from contextlib import suppress

import pytest
import structlog
from structlog.testing import capture_logs

from inference_service.__main__ import main
from shared import service_metrics
from shared.errors import InvalidInput
from shared.service_metrics import serve_metrics
from tests.exported_metrics import busy_metrics
from tests.waiting import wait_until


def _get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return response.headers["Content-Type"], response.read().decode()


def test_a_free_port_is_picked_logged_and_given_back():
    with capture_logs() as logs, serve_metrics("127.0.0.1:0", busy_metrics().registry) as port:
        kind, text = _get(port)
        assert kind.startswith("text/plain")
        assert 'neap_num_requests_waiting{model_id="tiny"} 2.0' in text
        (line,) = logs
        assert (line["event"], line["port"]) == ("metrics listening", port)
    with pytest.raises(urllib.error.URLError):
        _get(port)


def test_connections_that_say_nothing_take_few_places_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(service_metrics, "MOST_SCRAPES", 2)
    monkeypatch.setattr(service_metrics, "SCRAPE_S", 0.2)
    with serve_metrics("127.0.0.1:0", busy_metrics().registry) as port:
        silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(4)]
        # Two are closed at once, and two after their time.
        assert [connection.recv(1) for connection in silent] == [b""] * 4
        for connection in silent:
            connection.close()

        def is_given():
            with suppress(OSError):  # a place is free once its thread has ended
                return _get(port)[0].startswith("text/plain")

        wait_until(is_given)


def test_off_serves_nothing():
    before = threading.active_count()
    with serve_metrics("", busy_metrics().registry) as port:
        assert port == 0
        assert threading.active_count() == before


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "no.such.host.invalid:0", "203.0.113.1:0"])
def test_unusable_addresses_are_bad_configuration(listen):
    with pytest.raises(InvalidInput) as caught, serve_metrics(listen, busy_metrics().registry):
        pass
    assert caught.value.reason == "BAD_CONFIGURATION"
    assert listen in caught.value.message


def test_a_worker_whose_metrics_port_is_taken_says_so_and_exits_with_2(tmp_path, capfd, request):
    # asyncio's signal handlers need the main thread, in which pytest runs.
    assert threading.current_thread() is threading.main_thread()
    request.addfinalizer(structlog.reset_defaults)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "config.json").write_text("{}")
        flags = ["--model", f"tiny={tmp_path}", "--listen", "127.0.0.1:0"]
        flags += ["--data-dir", str(tmp_path), "--metrics-listen", address]
        assert main(flags) == 2
    said = capfd.readouterr().err
    assert f"metrics cannot be served on {address}" in said
    assert "BAD_CONFIGURATION" in said
    assert "Traceback" not in said
