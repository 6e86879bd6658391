from pathlib import Path

import pytest

from shared.calibrator_settings import CalibratorSettings
from shared.config import known_variables, make_settings, settings_from_command_line
from shared.errors import InvalidInput
from shared.service_settings import ModelSource
from shared.worker_settings import WorkerSettings
from tests.reasons import raises


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("NEAP_")]:
        monkeypatch.delenv(name)


def test_defaults_are_resolved():
    settings = WorkerSettings()
    assert settings.registry == str(settings.data_dir / "registry")
    assert settings.models == ()


def test_flags_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("NEAP_WORKER_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("NEAP_CALIBRATOR_LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("NEAP_MODELS", "a=/models/a, b=org/b=c")
    monkeypatch.setenv("NEAP_MAX_QUEUE", "7")
    monkeypatch.setenv("NEAP_TEXT_FOLDERS", "/t,/u")
    monkeypatch.setenv("UNRELATED", "x")
    worker = settings_from_command_line(WorkerSettings, "worker", [])
    assert worker.listen == "127.0.0.1:1"
    assert worker.models == (ModelSource("a", "/models/a"), ModelSource("b", "org/b=c"))
    assert worker.max_queue == 7
    calibrator = settings_from_command_line(CalibratorSettings, "calibrator", [])
    assert calibrator.listen == "127.0.0.1:2"
    assert calibrator.text_folders == (Path("/t"), Path("/u"))

    flags = ["--listen", "127.0.0.1:3", "--model", "c=d", "--model", "e=f", "--grace-s", "0.5"]
    worker = settings_from_command_line(WorkerSettings, "worker", flags)
    assert worker.listen == "127.0.0.1:3"
    assert worker.models == (ModelSource("c", "d"), ModelSource("e", "f"))
    assert worker.grace_s == 0.5
    assert worker.max_queue == 7


@pytest.mark.parametrize(
    ("said", "allowed"), [("a/b, c/*", ("a/b", "c/*")), ("*", ("*",)), ("none", ()), ("", ()), (None, ("*",))]
)
def test_allowed_datasets(monkeypatch, said, allowed):
    if said is not None:
        monkeypatch.setenv("NEAP_HUB_DATASETS", said)
    settings = settings_from_command_line(CalibratorSettings, "calibrator", [])
    assert settings.hub_datasets == allowed
    with pytest.raises(InvalidInput, match="none cannot be combined"):
        make_settings(CalibratorSettings, hub_datasets=["none", "a/b"])


@pytest.mark.parametrize(
    "given",
    [
        {"models": ["no-source"]},
        {"models": ["=x"]},
        {"models": ["a=x", "a=y"]},
        {"grace_s": "nan"},
        {"grace_s": -1},
        {"threads": 0},
        {"max_running": 0},
        {"max_queue": 0},
        {"stall_timeout_s": 0},
        {"metrics_listen": "9090"},
        {"metrics_listen": "host:port"},
        {"no_such_setting": 1},
    ],
    ids=str,
)
def test_bad_values_are_refused(given):
    with raises(InvalidInput, "BAD_CONFIGURATION") as caught:
        make_settings(WorkerSettings, **given)
    assert next(iter(given)) in caught.value.message or "same id" in caught.value.message


@pytest.mark.parametrize("kind", [WorkerSettings, CalibratorSettings])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("NEAP_MODEL", "NEAP_MODELS"),
        ("NEAP_AUTH_TOKEN", "NEAP_AUTH_TOKENS"),
        ("NEAP_TEXT_FOLDER", "NEAP_TEXT_FOLDERS"),
        ("NEAP_WORKER_LISTENS", "NEAP_WORKER_LISTEN"),
        ("neap_max_quue", "NEAP_MAX_QUEUE"),
        ("NEAP_XYZZY", ""),
    ],
)
def test_a_variable_that_nothing_reads_is_refused(monkeypatch, kind, name, hint):
    monkeypatch.setenv(name, "secret")
    with raises(InvalidInput, "BAD_CONFIGURATION") as caught:
        settings_from_command_line(kind, "x", [])
    assert f"{name} is not known" in caught.value.message
    assert caught.value.message.endswith(f"did you mean {hint}?" if hint else "not known")
    assert "secret" not in caught.value.message


def test_shares_of_pools_to_learn_from(monkeypatch):
    assert WorkerSettings().learn == ()
    given = settings_from_command_line(WorkerSettings, "worker", ["--learn", "legal=.25", "--learn", "*=1"])
    assert given.learn == ("legal=.25", "*=1")
    monkeypatch.setenv("NEAP_LEARN", "default=0.1, shop=0")
    assert WorkerSettings().learn == ("default=0.1", "shop=0")
    for wrong in ("legal", "legal=", "legal=2", "legal=1.5", "legal=-1", "legal=nan", "Legal=1", "=1", "legal=1e-3"):
        with pytest.raises(InvalidInput):
            settings_from_command_line(WorkerSettings, "worker", ["--learn", wrong])


def test_who_learns_from_traffic_has_a_model(monkeypatch):
    monkeypatch.setenv("NEAP_LEARN_FROM_TRAFFIC", "true")
    with pytest.raises(InvalidInput, match="needs a model"):
        settings_from_command_line(CalibratorSettings, "calibrator", [])
    assert settings_from_command_line(CalibratorSettings, "calibrator", ["--model", "a=/a"]).learn_from_traffic


def test_aliases_to_load_in_advance(monkeypatch):
    assert WorkerSettings().preload_aliases == ()
    flags = ["--preload-alias", "stable", "--preload-alias", "a"]
    given = settings_from_command_line(WorkerSettings, "worker", flags)
    assert given.preload_aliases == ("stable", "a")
    monkeypatch.setenv("NEAP_PRELOAD_ALIASES", "latest, b")
    assert WorkerSettings().preload_aliases == ("latest", "b")
    with pytest.raises(InvalidInput):
        settings_from_command_line(WorkerSettings, "worker", ["--preload-alias", "No Alias"])


def test_other_variables_are_ignored(monkeypatch):
    """Those of the other service, of clients, of the build and of tests, and those that Kubernetes adds for Services
    named neap-..."""
    links = [
        *("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_7071_TCP"),
        *("PORT_7071_TCP_PROTO", "PORT_7071_TCP_PORT", "PORT_7071_TCP_ADDR"),
    ]
    for link in links:
        for service in ("NEAP_WORKER", "NEAP_CALIBRATOR", "NEAP_MY_REDIS"):
            monkeypatch.setenv(f"{service}_{link}", "tcp://10.0.0.1:7071")
    for name in ("NEAP_TOKEN", "NEAP_CLIENT_CA", "NEAP_BUILD_CUDA", "NEAP_FUZZ_S"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NEAP_TEXT_FOLDERS", "/t")
    monkeypatch.setenv("NEAP_METRICS_LISTEN", "127.0.0.1:9090")
    assert settings_from_command_line(WorkerSettings, "worker", []).metrics_listen
    assert settings_from_command_line(CalibratorSettings, "calibrator", []).text_folders


def test_every_setting_has_a_variable_that_is_known():
    known = known_variables()
    assert {"NEAP_WORKER_LISTEN", "NEAP_CALIBRATOR_HEALTH_LISTEN", "NEAP_TOKEN_FILE"} <= known
    for kind in (WorkerSettings, CalibratorSettings):
        for name in set(kind.model_fields) - {"listen", "health_listen"}:
            assert name.startswith("otel_") or f"NEAP_{name.upper()}" in known
    assert not any("OTEL" in name for name in known)


@pytest.mark.parametrize(("kind", "flag"), [(WorkerSettings, "--text-folder"), (CalibratorSettings, "--max-queue")])
def test_each_service_knows_only_its_flags(kind, flag, capsys):
    with pytest.raises(SystemExit):
        settings_from_command_line(kind, "x", [flag, "1"])
    assert "unrecognized" in capsys.readouterr().err
