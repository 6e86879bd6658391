"""The page of settings has what the settings' fields say, and each of them says something."""

import pytest

from docs.generators.settings import client_flag, settings_page
from shared.calibrator_settings import CalibratorSettings
from shared.config import flag_of, settings_from_command_line, variables_of
from shared.gateway_settings import GatewaySettings
from shared.security_settings import ClientSettings
from shared.worker_settings import WorkerSettings
from tests.docs.test_line_lengths import prose, too_long

SERVICES = (WorkerSettings, CalibratorSettings, GatewaySettings)


@pytest.fixture(scope="module")
def rows() -> list[str]:
    """The rows of all tables of the page."""
    return [line for line in settings_page().splitlines() if line.startswith(("| `", "|  |"))]


@pytest.mark.parametrize("kind", [*SERVICES, ClientSettings])
def test_the_page_has_a_row_for_every_setting(kind, rows):
    for name, field in kind.model_fields.items():
        flag = client_flag(name) if kind is ClientSettings else flag_of(kind, name)
        names = f"| {f'`{flag}`' if flag else ''} | {' or '.join(f'`{name}`' for name in variables_of(kind, name))} |"
        meaning = field.description.replace("|", "\\|")
        assert any(row.startswith(names) and row.endswith(f" | {meaning} |") for row in rows), names


@pytest.mark.parametrize(
    "row",
    [
        "| `--max-queue` | `NEAP_MAX_QUEUE` | integer, at least 1 | 64 | ",
        "| `--compile-layers` | `NEAP_COMPILE_LAYERS` | auto, on, off | auto | ",
        "| `--listen` | `NEAP_GATEWAY_LISTEN` | HOST:PORT | ",
    ],
)
def test_a_row_has_values_and_default(row, rows):
    assert any(line.startswith(row) for line in rows)


def test_the_page_does_not_depend_on_the_environment(monkeypatch):
    page = settings_page()
    monkeypatch.setenv("NEAP_MAX_QUEUE", "7")
    monkeypatch.setenv("HOME", "/elsewhere")
    assert settings_page() == page
    assert not too_long(prose(page))


@pytest.mark.parametrize("kind", [*SERVICES, ClientSettings])
def test_every_setting_is_described_in_a_sentence(kind):
    for name, field in kind.model_fields.items():
        assert (field.description or "").endswith("."), f"{kind.__name__}.{name}"


@pytest.mark.parametrize("kind", SERVICES)
def test_help_shows_flag_text_default_and_variable_of_every_setting(kind, capsys):
    with pytest.raises(SystemExit):
        settings_from_command_line(kind, "service", ["--help"])
    shown = "".join(capsys.readouterr().out.split())
    for name, field in kind.model_fields.items():
        if flag := flag_of(kind, name):
            described = "".join(field.description.split())
            assert flag in shown
            assert described + "[default:" in shown, name
            assert variables_of(kind, name)[0] + "]" in shown, name


def test_variables_of_opentelemetry_have_no_flag():
    assert flag_of(WorkerSettings, "otel_endpoint") is None


def test_a_setting_of_several_values_has_a_flag_in_the_singular():
    assert flag_of(WorkerSettings, "models") == "--model"
    assert flag_of(CalibratorSettings, "text_folders") == "--text-folder"


def test_a_value_of_a_repeated_flag_may_hold_a_comma(monkeypatch):
    monkeypatch.delenv("NEAP_MODELS", raising=False)
    settings = settings_from_command_line(WorkerSettings, "service", ["--model", "a=/b,c"])
    assert [model.source for model in settings.models] == ["/b,c"]
