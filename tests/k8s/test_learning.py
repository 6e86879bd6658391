"""The components that keep answers and learn from them, with a worker of its own and in one pod."""

import pytest

from shared.calibrator_settings import CalibratorSettings
from shared.config import settings_from_command_line
from shared.errors import InvalidInput
from shared.worker_settings import WorkerSettings
from tests.kustomize import environment, render, services

KINDS = {"worker": WorkerSettings, "calibrator": CalibratorSettings}


def settings_of(objects, monkeypatch):
    found = {}
    for name, kind in KINDS.items():
        with monkeypatch.context() as patch:
            for variable, value in environment(objects, services(objects)[name][0]).items():
                patch.setenv(variable, value)
            found[name] = settings_from_command_line(kind, name, [])
    return found


@pytest.mark.parametrize("overlay", ["local", "cpu"])
def test_workers_keep_answers_and_the_calibrator_which_has_the_model_learns(overlay, monkeypatch):
    plain = settings_of(render(overlay), monkeypatch)
    assert (plain["worker"].learn, plain["calibrator"].learn_from_traffic) == ((), False)
    found = settings_of(render(overlay, ("learning",)), monkeypatch)
    assert found["worker"].learn == ("default=1",)
    assert found["worker"].traffic_key is found["calibrator"].traffic_key is None
    assert found["calibrator"].learn_from_traffic
    # In the same registry, and of the same models.
    assert found["worker"].registry == found["calibrator"].registry
    assert found["worker"].sources.keys() == found["calibrator"].sources.keys() != set()


@pytest.mark.parametrize("overlay", ["local", "cpu"])
def test_an_overlay_names_the_pools(overlay, monkeypatch):
    objects = render(overlay, ("learning",))
    for (kind, name), item in objects.items():
        if kind == "ConfigMap" and name.startswith("neap-settings"):
            item["data"]["NEAP_LEARN"] = "legal=1,default=0.2"
    assert settings_of(objects, monkeypatch)["worker"].learn == ("legal=1", "default=0.2")


def test_a_service_without_a_model_refuses_to_learn(monkeypatch):
    with pytest.raises(InvalidInput, match="needs a model"):
        settings_of(render("gpu", ("learning",)), monkeypatch)


@pytest.mark.parametrize("overlay", ["local", "cpu"])
def test_both_services_have_the_key_and_start_with_it_alone(overlay, monkeypatch):
    objects = render(overlay, ("learning", "traffic-key"))
    found = settings_of(objects, monkeypatch)
    for name, (container, spec) in services(objects).items():
        if name == "gateway":
            assert "neap-traffic-key" not in str(spec)
            continue
        folder, _, file = str(found[name].traffic_key).rpartition("/")
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == folder]
        (volume,) = [volume for volume in spec["volumes"] if volume["name"] == mount["name"]]
        assert (file, mount["readOnly"], "subPath" in mount) == ("key", True, False)
        # Not optional: a pod without the Secret does not start, so nothing is kept unencrypted.
        assert volume["secret"] == {"secretName": "neap-traffic-key", "defaultMode": 0o440}
