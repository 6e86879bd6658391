"""The component by which several pods calibrate together."""

import pytest
from torch.distributed.run import parse_args

from calibrator_service import rank
from calibrator_service.calibration.ranks import Ranks
from shared.calibrator_settings import CalibratorSettings
from shared.config import make_settings
from tests.kustomize import environment, render

COMPONENTS = ("gateway", "shared-registry", "security", "calibration-ranks", "models-from-claim", "gpu")
NAME = "neap-calibration-ranks"


@pytest.fixture(scope="module")
def objects():
    return render("base", COMPONENTS)


def test_torchrun_and_the_rank_take_what_a_pod_gives_them(objects, monkeypatch):
    job = objects["CronJob", NAME]["spec"]["jobTemplate"]["spec"]
    spec = job["template"]["spec"]
    [container] = spec["containers"]
    # A model is named where a deployment has one: the base has none.
    variables = environment(objects, container) | {"JOB_NAME": "one", "MODEL_ID": "tiny", "NEAP_MODELS": "tiny=/models"}
    for name, value in (variables | {"NEAP_REGISTRY": "/registry"}).items():
        monkeypatch.setenv(name, value)
    arguments = container["args"]
    for name in ("JOB_NAME", "MODEL_ID"):
        arguments = [argument.replace(f"$({name})", variables[name]) for argument in arguments]
    launch = parse_args(arguments)
    assert int(launch.nnodes) == job["completions"] == job["parallelism"]
    assert (launch.training_script, launch.module) == ("calibrator_service.rank", True)
    # The hostname of the first pod of an indexed Job, by the Service of its subdomain.
    assert launch.rdzv_endpoint.split(":")[0] == f"one-0.{spec['subdomain']}"
    assert objects["Service", spec["subdomain"]]["spec"]["selector"].items() <= (
        job["template"]["metadata"]["labels"].items()
    )
    assert job["completionMode"] == "Indexed"
    assert launch.max_restarts == 0, "all pods start again together"
    assert job["backoffLimit"] >= 2 * job["completions"]
    assert (spec["restartPolicy"], job["podFailurePolicy"]["rules"][0]["action"]) == ("Never", "Ignore")
    asked = []
    monkeypatch.setattr(rank, "calibrate", lambda *arguments: asked.append(arguments))
    assert rank.main([*launch.training_script_args, "--request-id", "one"]) == 0
    [(ranks, text, request_id, work_dir, settings)] = asked
    assert (type(ranks), str(work_dir)) == (Ranks, "/data/one")
    aliases, read = rank.read_request(text, settings)
    assert (request_id, list(aliases), read.model_id, read.max_tokens) == ("one", ["latest"], "tiny", 700_000)
    assert make_settings(CalibratorSettings).device == "cuda"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert mounts["work"] == "/data"
    assert "persistentVolumeClaim" in volumes["work"], "what ranks have made survives their pods"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_ranks_reach_each_other_and_nobody_else(objects):
    policy = objects["NetworkPolicy", NAME]["spec"]
    labels = objects["CronJob", NAME]["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    ranks = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": NAME}}}
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["ingress"] == [{"from": [ranks]}]
    assert policy["egress"] == [{"to": [ranks]}]


def test_kueue_finds_the_queue_of_the_job(objects):
    labels = objects["CronJob", NAME]["spec"]["jobTemplate"]["metadata"]["labels"]
    assert labels == {"kueue.x-k8s.io/queue-name": "neap"}
