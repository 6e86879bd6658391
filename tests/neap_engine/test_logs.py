import logging

import structlog

from neap_engine.logs import log_to_logging


def test_lines_go_to_logging_and_not_to_standard_output(caplog, capsys):
    log_to_logging()
    with caplog.at_level(logging.INFO, logger="neap"):
        structlog.get_logger("neap.model").info("model loaded", model_id="tiny")
    assert caplog.record_tuples == [("neap.model", logging.INFO, "event='model loaded' model_id='tiny'")]  # fmt: skip
    structlog.get_logger("neap.model").debug("a detail")
    assert capsys.readouterr().out == ""


def test_a_line_about_an_error_has_the_error(caplog):
    log_to_logging()
    try:
        raise OSError("the disk is on fire: 100 %")
    except OSError:
        structlog.get_logger("neap.model").warning("cannot load model", exc_info=True)
    assert caplog.messages == ["event='cannot load model'"]
    assert "OSError: the disk is on fire: 100 %" in caplog.text


def test_an_application_that_has_configured_structlog_keeps_its_own(capsys):
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    log_to_logging()
    structlog.get_logger("neap.model").info("model loaded")
    assert capsys.readouterr().out == '{"event": "model loaded"}\n'
