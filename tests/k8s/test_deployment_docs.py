"""docs/deployment.md and docs/security.md against the rendered manifests: commands, names, labels, the example
overlay."""

import os
import re
import shlex
import shutil
import subprocess

import pytest

from tests.k8s.test_settings import parse
from tests.kustomize import COMPOSITIONS, K8S, OVERLAYS, name_of, pods, program, render

ROOT = K8S.parent
OWN = "k8s/overlays/$NAME"  # the reader's
PAGE = (ROOT / "docs" / "deployment.md").read_text()
SHORT = {"statefulset": "StatefulSet", "deployment": "Deployment", "service": "Service", "cronjob": "CronJob"}


def commands() -> list[list[str]]:
    """Words of each command in the shell blocks of the pages about Kubernetes."""
    pages = PAGE + (ROOT / "docs" / "security.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", pages, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    plain = [line for line in lines if line.startswith(("kubectl ", "neap "))]
    words = [shlex.split(line, comments=True) for line in plain if not line.endswith("\\")]
    return [line for line in words if line]


def everything() -> dict[tuple[str, str], dict]:
    return {key: item for composition in COMPOSITIONS for key, item in render(*composition).items()}


def secrets_used() -> set[str]:
    """Names of Secrets that any pod mounts or reads."""
    found = set()

    def visit(node):
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "secretRef":
                    found.add(value["name"])
                elif key == "secretName":
                    found.add(value)
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit([template for key in COMPOSITIONS for _, template in pods(render(*key))])
    return found


def test_kubectl_commands_name_what_is_rendered():
    objects, jobs = everything(), set()
    checked = [words for words in commands() if words[0] == "kubectl"]
    for words in checked:
        if "-k" in words:
            overlay = words[words.index("-k") + 1]
            assert overlay == OWN or (ROOT / overlay / "kustomization.yaml").exists()
            continue
        if words[1:3] == ["create", "namespace"]:
            assert ("Namespace", words[3]) in objects
            continue
        assert words[words.index("--namespace") + 1] == "neap", words
        if words[1:4] == ["create", "secret", "generic"]:
            assert words[4] in secrets_used()
        for kind, name in (word.split("/") for word in words if re.fullmatch(r"[a-z]+/[\w-]+", word)):
            if kind == "job":
                assert name in jobs
            else:
                assert (SHORT[kind], name) in objects, words
        for word in words:
            if word.startswith("--from=cronjob/"):
                assert ("CronJob", word.partition("/")[2]) in objects
                jobs.add(words[-1])
        for word in words:
            if match := re.fullmatch(r"(\d+):(\d+)", word):
                _, name = next(one for one in words if one.startswith("service/")).split("/")
                (port,) = objects["Service", name]["spec"]["ports"]
                assert port["port"] == int(match[2])
    assert len(checked) > 8


def test_commands_after_apply_name_what_this_overlay_has():
    """Other compositions may have the object. Who follows the page has this one."""
    objects, checked = {}, 0
    for words in commands():
        if "-k" in words:
            overlay = words[words.index("-k") + 1].rpartition("/")[2]
            objects = render(overlay) if overlay in OVERLAYS else {}
        for kind, name in (word.split("/") for word in words if re.fullmatch(r"\w+/[\w-]+", word)):
            if not objects or kind == "job":
                continue
            assert (SHORT[kind], name) in objects, words
            checked += 1
            if "--container" in words:
                spec = objects[SHORT[kind], name]["spec"]["template"]["spec"]
                container = words[words.index("--container") + 1]
                assert container in {one["name"] for one in spec["containers"]}
    assert checked > 5


def test_neap_commands_exist_and_name_the_model_of_the_overlay():
    settings = (K8S / "base" / "kustomization.yaml").read_text()
    model = re.search(r"NEAP_MODELS=([\w-]+)=", settings)[1]
    found = [shlex.split(line) for line in PAGE.splitlines() if line.startswith("neap ")]
    assert len(found) == 2, found
    for words in found:
        parse(words[1:])
        assert words[words.index("--model") + 1] == model


def test_the_secret_of_the_registry_has_what_the_component_reads():
    assert "neap-registry" in secrets_used()
    (block,) = re.findall(r"<<END\n(.*?)^END$", PAGE, re.M | re.S)
    assert {line.partition("=")[0] for line in block.splitlines()} == {
        "NEAP_REGISTRY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_REGION",
    }


def test_the_example_renders(tmp_path):
    text, patch = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    inside = os.path.relpath(K8S, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(text.replace("../../", f"{inside}/"))
    (copied,) = [line.split() for line in PAGE.splitlines() if line.startswith("cp ")]
    assert copied[2] == f"{OWN}/"
    shutil.copy(ROOT / copied[1], tmp_path)
    command = [program("kubectl"), "kustomize", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "MODEL_SOURCE: s3://models/my-model" in result.stdout
    assert "NEAP_MODELS: my-model=/models/my-model" in result.stdout
    assert set(re.findall(r"image: (\S+)", result.stdout)) == {"neap:0.1.0-gpu"}
    assert "kind: Namespace" in result.stdout
    needed = set(re.findall(r"secretRef:\s+name: (\S+)", result.stdout))
    own = PAGE.partition("## An overlay of your own")[2].partition("\n## ")[0]
    assert needed == set(re.findall(r"create secret generic (\S+)", own)) == {"neap-registry", "neap-models"}
    from_image = text.replace("models-from-s3", "models-from-image").replace("../../", f"{inside}/")
    (tmp_path / "kustomization.yaml").write_text(from_image + patch)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    named = set(re.findall(r"reference: (\S+)", result.stdout))
    assert named == {"registry.example/models/my-model:1", "neap-models:0.1.0"}, "the suspended CronJob has its own"


def test_tables_list_every_overlay_and_component():
    named = set(re.findall(r"^\| `([\w-]+)`(?: \||: )", PAGE, re.M))
    components = {path.parent.name for path in (K8S / "components").glob("*/kustomization.yaml")}
    overlays = {path.name for path in (K8S / "overlays").iterdir()}
    assert overlays == set(OVERLAYS)
    assert components | overlays <= named


def test_labels_that_open_doors_are_the_documented_ones():
    documented = set(re.findall(r"^\| `([\w./-]+): \"?([\w-]+)\"?` \|", PAGE, re.M))
    used = set()
    for (kind, _), item in everything().items():
        if kind != "NetworkPolicy":
            continue
        for way, peers in (("ingress", "from"), ("egress", "to")):
            for rule in item["spec"].get(way, ()):
                for peer in rule.get(peers, ()):
                    for selector in peer.values():
                        used |= set(selector.get("matchLabels", {}).items())
    assert used == documented


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=name_of)
def test_everything_is_in_the_namespace(composition):
    for (kind, name), item in render(*composition).items():
        if kind != "Namespace":
            assert item["metadata"]["namespace"] == "neap", (kind, name)
