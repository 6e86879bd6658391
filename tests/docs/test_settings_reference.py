"""docs/settings.md is what the settings' fields say, and each of them says something."""

from pathlib import Path

import pytest

from docs.generators.settings import settings_page
from shared.config import settings_from_command_line
from shared.gateway_settings import GatewaySettings
from shared.security_settings import ClientSettings
from shared.service_settings import CalibratorSettings, WorkerSettings
from shared.settings_flags import flag_of, variables_of

ROOT = Path(__file__).parents[2]
SERVICES = (WorkerSettings, CalibratorSettings, GatewaySettings)


def test_the_page_is_generated_from_the_settings():
    assert (ROOT / "docs/settings.md").read_text() == settings_page(), (
        "run: python -m docs.generators.settings > docs/settings.md"
    )


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
