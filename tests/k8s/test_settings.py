"""What the manifests say must be true of the services: variables, flags, ports, probes, and how safely they run."""

import functools
import os
import re
import shlex

import click
import pytest
import typer
from torch.distributed import run as torchrun

from calibrator_service import router_servicer
from calibrator_service import servicer as calibration_servicer
from inference_service import servicer as inference_servicer
from neap_engine.cli.main import app
from shared.calibrator_settings import CalibratorSettings
from shared.config import settings_from_command_line
from shared.gateway_settings import GatewaySettings
from shared.worker_settings import WorkerSettings
from tests.kustomize import COMPOSITIONS, OVERLAYS, containers, environment, name_of, pods, render, services

SETTINGS = {"worker": WorkerSettings, "calibrator": CalibratorSettings, "gateway": GatewaySettings}
SERVICE_NAMES = {"worker": inference_servicer.SERVICE_NAME, "calibrator": calibration_servicer.SERVICE_NAME}
# The policy that lets callers and Prometheus in.
POLICIES = {"worker": "neap", "calibrator": "neap", "gateway": "neap-gateway"}
# The port that clients call.
CALLED = {"worker": "grpc", "calibrator": "grpc", "gateway": "http"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
GPU = "nvidia.com/gpu"
each_composition = pytest.mark.parametrize("composition", COMPOSITIONS, ids=name_of)


def ports_of(container):
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@pytest.fixture
def settings_in(monkeypatch):
    """The settings of a service inside its container: variables and flags as there."""

    def read(objects, name, container):
        for variable in [*os.environ]:
            if variable.startswith("NEAP_"):
                monkeypatch.delenv(variable)
        variables = environment(objects, container)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        # Raises for an unknown variable, for a value out of range, and for an unknown flag.
        return settings_from_command_line(SETTINGS[name], name, container["args"][2:])

    return read


@each_composition
def test_the_services_accept_their_settings(composition, settings_in):
    objects = render(*composition)
    for name, (container, spec) in services(objects).items():
        assert container["args"][:2] == ["serve", name]
        settings = settings_in(objects, name, container)
        ports = ports_of(container)
        assert settings.listen == f"0.0.0.0:{ports[CALLED[name]]}"
        assert settings.metrics_listen == f"0.0.0.0:{ports['metrics']}"
        assert spec["terminationGracePeriodSeconds"] > settings.grace_s + settings.drain_timeout_s + 5
        # Within the notice of a node that is reclaimed, where the worker has a pod of its own.
        if name == "worker" and len(spec["containers"]) == 1:
            assert spec["terminationGracePeriodSeconds"] <= 30
        if name == "gateway":
            continue
        assert settings.health_listen == f"0.0.0.0:{ports['health']}"
        for probe in PROBES:
            assert container[probe]["grpc"]["port"] == ports["health"]
        assert container["readinessProbe"]["grpc"]["service"] == SERVICE_NAMES[name]
        assert str(settings.data_dir) in {mount["mountPath"] for mount in container["volumeMounts"]}
        for source in settings.models:
            assert source.source.startswith("/models/")
        if name == "worker":
            assert len(settings.models) == 1


@each_composition
def test_threads_follow_the_request(composition, settings_in):
    objects = render(*composition)
    for name, (container, _) in services(objects).items():
        if name == "gateway":
            continue
        requested = container["resources"]["requests"]["cpu"]
        expected = 1 if requested.endswith("m") else int(requested)
        assert settings_in(objects, name, container).threads == expected


@each_composition
def test_services_and_routes_lead_to_the_ports_of_their_pods(composition):
    objects = render(*composition)
    numbers = {name: ports_of(container) for name, (container, _) in services(objects).items()}
    for (kind, name), item in objects.items():
        if kind == "Service" and name != "neap-calibration-ranks":  # ranks choose their ports
            (port,) = item["spec"]["ports"]
            own = next(one for one in ("worker", "calibrator", "gateway") if one in name)
            assert port["name"] == CALLED[own]
            assert port["port"] == port["targetPort"] == numbers[own][CALLED[own]]
            (labels,) = [
                template["metadata"]["labels"]
                for _, template in pods(objects)
                if any(one["name"] == own for one in template["spec"]["containers"])
            ]
            assert item["spec"]["selector"].items() <= labels.items()
            assert (item["spec"].get("clusterIP") == "None") == (not name.endswith("-gateway"))
        if kind == "GRPCRoute":
            own = name.removeprefix("neap-")
            known = {SERVICE_NAMES[own]} | ({router_servicer.SERVICE_NAME} - {SERVICE_NAMES["worker"]})
            for rule in item["spec"]["rules"]:
                asked = {match["method"]["service"] for match in rule["matches"]}
                assert asked == (known if own == "calibrator" else {SERVICE_NAMES["worker"]})
                for backend in rule["backendRefs"]:
                    (port,) = objects["Service", backend["name"]]["spec"]["ports"]
                    assert port["port"] == backend["port"]


@each_composition
def test_metrics_are_served_where_prometheus_looks(composition):
    objects = render(*composition)
    monitored = {}
    for (kind, name), item in objects.items():
        if kind == "PodMonitor":
            (endpoint,) = item["spec"]["podMetricsEndpoints"]
            monitored[name] = endpoint["portNumber"], endpoint["path"]
    for name, (container, _) in services(objects).items():
        ports = ports_of(container)
        allowed = {
            port["port"]
            for rule in objects["NetworkPolicy", POLICIES[name]]["spec"]["ingress"]
            for port in rule["ports"]
        }
        assert {ports["metrics"], ports[CALLED[name]]} <= allowed
        assert ports.get("health") not in allowed
        if monitored:
            assert monitored[f"neap-{name}"] == (ports["metrics"], "/metrics")
            selector = objects["PodMonitor", f"neap-{name}"]["spec"]["selector"]["matchLabels"]
            (labels,) = [
                template["metadata"]["labels"]
                for _, template in pods(objects)
                if any(one["name"] == name for one in template["spec"]["containers"])
            ]
            assert selector.items() <= labels.items()
    for name, template in pods(objects):
        if "annotations" in template["metadata"]:
            (container,) = [one for one in template["spec"]["containers"] if one["name"] == name.removeprefix("neap-")]
            annotated = template["metadata"]["annotations"]["prometheus.io/port"]
            assert annotated == str(ports_of(container)["metrics"])


@each_composition
def test_pods_run_with_the_least_they_need(composition):
    objects = render(*composition)
    assert objects["ServiceAccount", "neap"]["automountServiceAccountToken"] is False
    images = set()
    for name, container, spec in containers(objects):
        # The gateway computes nothing: outside the overlay's own list of components it keeps the image for CPUs.
        images |= {container["image"]} - ({"neap:0.1.0"} if name == "gateway" else set())
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert environment(objects, container)["HOME"] in {
            mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
        }
    (image,) = images  # one image everywhere
    assert image.endswith("-gpu") == ("gpu" in name_of(composition).split("+"))
    for name, template in pods(objects):
        labels = template["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "neap", name
    policy = objects["NetworkPolicy", "neap"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert not [name for kind, name in objects if kind == "Secret"]


@each_composition
def test_commands_and_flags_are_those_of_neap(composition):
    """Every container's arguments, by the parser of the command line itself."""
    objects = render(*composition)
    for name, container, _ in containers(objects):
        if "command" in container:  # torchrun's: see test_ranks.py
            continue
        variables = environment(objects, container)
        arguments = [
            variables.get(argument[2:-1], argument) if argument.startswith("$(") else argument
            for argument in container["args"]
        ]
        assert not any(argument.startswith("$") for argument in arguments), name
        parse(arguments)


COMMAND_LINE = functools.cache(lambda: typer.main.get_command(app))


def parse(arguments):
    """Raises click.UsageError for a command or flag that does not exist."""
    command, context = COMMAND_LINE(), None
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        found, *arguments = arguments
        context = click.Context(command, parent=context)
        assert found in command.commands, found
        command = command.commands[found]
    if found not in SETTINGS:
        command.make_context(found, list(arguments), parent=context)


def test_a_flag_that_does_not_exist_is_noticed():
    parse(shlex.split("models fetch a b"))
    with pytest.raises(Exception, match="--nonsense"):
        parse(shlex.split("calibrate --model a --nonsense"))


def test_the_gpu_overlay_asks_for_the_fast_path(settings_in):
    objects = render("gpu")
    worker, _ = services(objects)["worker"]
    settings = settings_in(objects, "worker", worker)
    assert (settings.device, settings.record_passes, settings.compile_layers) == ("cuda", "on", "on")
    for overlay in ("local", "cpu"):
        objects = render(overlay)
        settings = settings_in(objects, "worker", services(objects)["worker"][0])
        assert (settings.device, settings.record_passes) == ("cpu", "auto")


def test_a_gpu_is_held_by_workers_and_by_calibrations_that_run(settings_in):
    objects = render("gpu")
    holders = {name for name, container, _ in containers(objects) if GPU in container["resources"]["limits"]}
    assert holders == {"worker", "calibration"}
    job = objects["CronJob", "neap-calibration"]["spec"]
    assert job["suspend"] is True
    calibrator, _ = services(objects)["calibrator"]
    assert settings_in(objects, "calibrator", calibrator).models == ()
    for overlay in ("local", "cpu"):
        for _, container, _ in containers(render(overlay)):
            assert GPU not in container["resources"]["limits"]


@pytest.mark.parametrize("components", [(), ("security",)], ids=["plain", "security"])
def test_a_calibration_accepts_its_settings_and_has_its_model(components, monkeypatch):
    objects = render("gpu", components)
    (container,) = [one for name, one, _ in containers(objects) if name == "calibration"]
    variables = environment(objects, container)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    settings = settings_from_command_line(CalibratorSettings, "calibrator", [])
    assert container["args"][-2:] == ["--model", "$(MODEL_ID)"]
    assert [model.model_id for model in settings.models] == [variables["MODEL_ID"]]
    assert settings.device == "cuda"
    assert (settings.tls_cert, settings.auth_tokens, settings.health_listen) == (None, None, "")


def test_a_gpu_rollout_needs_a_spare_gpu_only_if_asked():
    def strategy(*composition):
        worker = render(*composition)["Deployment", "neap-worker"]
        return worker["spec"]["strategy"]["rollingUpdate"]

    assert strategy("gpu") == {"maxSurge": 0, "maxUnavailable": 1}
    assert strategy("gpu", ("surge",)) == {"maxSurge": 1, "maxUnavailable": 0}
    assert strategy("cpu") == {"maxSurge": 1, "maxUnavailable": 0}


def test_the_number_of_workers_is_left_to_the_scaler():
    assert "replicas" not in render("cpu", ("autoscaling",))["Deployment", "neap-worker"]["spec"]
    assert render("cpu")["Deployment", "neap-worker"]["spec"]["replicas"] == 2


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_restricted_pods_are_enforced(overlay):
    labels = render(overlay)["Namespace", "neap"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_ranks_of_several_nodes_accept_their_settings_and_have_a_card_each(monkeypatch):
    nodes = render("base", ("several-nodes", "gpu"))["LeaderWorkerSet", "neap-nodes"]["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        (container,) = nodes[role]["spec"]["containers"]
        assert container["command"] == ["python", "-m", "torch.distributed.run"]
        launcher, service = container["args"][:7], container["args"][7:]
        per_node = int(container["resources"]["limits"][GPU])
        assert launcher[:2] == [f"--nnodes={nodes['size']}", f"--nproc-per-node={per_node}"]
        for variable in container["env"]:
            monkeypatch.setenv(variable["name"], variable["value"])
        settings = settings_from_command_line(WorkerSettings, service[0], service[1:])
        assert settings.tensor_parallel == nodes["size"] * per_node
        assert container["image"].endswith("-gpu")
        assert "health" in [port["name"] for port in container.get("ports", ())] or role == "workerTemplate"
        parsed = config_from_args(container["args"])[0]
        assert (parsed.max_nodes, parsed.nproc_per_node, parsed.max_restarts) == (nodes["size"], per_node, 0)


def config_from_args(arguments):
    """As torchrun reads them, once Kubernetes has put the controller's variables in."""
    given = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "127.0.0.1"}
    return torchrun.config_from_args(
        torchrun.parse_args([re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], each) for each in arguments])
    )
