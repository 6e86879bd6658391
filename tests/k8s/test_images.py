"""The Dockerfile, by its linter and by what the manifests and the documents expect of it."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.kustomize import COMPOSITIONS, K8S, containers, program, render

ROOT = K8S.parent
DOCKERFILE = K8S / "Dockerfile"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TAGS = {VERSION, f"{VERSION}-gpu"}


def stages() -> dict[str, str]:
    """Name -> instructions of each stage."""
    parts = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.M)[1:]
    return {re.match(r"\S+ AS (\S+)", part)[1]: part for part in parts}


def test_the_linter_has_nothing_to_say():
    result = subprocess.run(
        [program("hadolint"), "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_one_tag_everywhere():
    tagged = {
        container["image"] for composition in COMPOSITIONS for _, container, _ in containers(render(*composition))
    }
    documents = [DOCKERFILE, ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for path in documents:
        tagged |= set(re.findall(r"\bneap:\d+\.[\w.-]+\w", path.read_text()))
        for line in re.findall(r"^.*docker build .*$", path.read_text(), re.M):
            assert re.search(r"--tag neap:\S", line), f"{path.name}: {line}"
    assert tagged == {f"neap:{tag}" for tag in TAGS}


def test_dependencies_are_installed_before_the_source_is_copied():
    for kind in ("cpu", "gpu"):
        before, build = stages()[f"{kind}-dependencies"], stages()[f"{kind}-build"]
        assert "COPY . ." not in before
        assert re.findall(r"^COPY (.*) \./\S*$", before, re.M) == [
            "k8s/requirements.py pyproject.toml",
            "protos/pyproject.toml",
        ]
        assert build.startswith(f"{kind}-dependencies AS")
        assert build.index("COPY . .") < build.index("make build-ops")


def test_requirements_are_all_that_an_installation_needs():
    listed = runpy.run_path(str(K8S / "requirements.py"))["requirements"]
    names = {Requirement(line).name for line in listed(ROOT, ["oci", "otel", "sign"])}
    assert {"grpcio", "grpcio-tools", "transformers", "hatchling", "opentelemetry-sdk"} <= names
    # Neither is on an index.
    assert not {"pytest", "neap-client", "neap-server"} & names
    for line in listed(ROOT, ["oci", "otel", "sign"]):
        assert "\n" not in line


def test_the_versions_of_torch_agree():
    makefile = re.search(r"^TORCH_VERSION \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)[1]
    assert re.findall(r"TORCH_VERSION=(\d\S*)", DOCKERFILE.read_text()) == [makefile]
    index = {kind: stages()[f"{kind}-dependencies"] for kind in ("cpu", "gpu")}
    assert "/whl/cpu\n" in index["cpu"]
    # nvcc is of the same CUDA release as torch.
    (cuda,) = re.findall(r"CUDA_VERSION=(\S+)", index["gpu"])
    assert f"/whl/cu{cuda.replace('.', '')}\n" in index["gpu"]
    assert "cuda-toolkit[cudart,nvcc]==${CUDA_VERSION}.*" in index["gpu"]


@pytest.mark.full
def test_what_a_gpu_image_asks_of_its_library_can_be_asked():
    (asks,) = re.findall(r"python -c '([^']+)'", stages()["gpu-build"])
    result = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False)
    # Without nvcc this machine's library is for the CPU alone.
    assert result.returncode == 0 or result.stderr.strip().endswith("AssertionError"), result.stderr


def test_a_gpu_image_can_compile_and_has_nvcc_only_while_it_is_built():
    gpu = stages()["gpu"]
    assert "g++" in gpu
    assert "Python.h" in gpu
    assert "/opt/cuda" not in gpu
    assert "CUDA_HOME=/opt/cuda/home" in stages()["gpu-build"]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_images_run_as_the_user_of_the_manifests(kind):
    assert "USER 10001:10001" in stages()[kind]
    # torch.compile asks for the user's name and fails if there is none.
    assert "useradd --uid 10001" in stages()["runtime"]
    for _, _, spec in containers(render("cpu")):
        assert spec["securityContext"]["runAsUser"] == 10001


def test_the_build_context_has_the_licence_and_all_that_is_copied():
    ignore = Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    kept = {line[1:] for line in ignore if line.startswith("!")}
    assert {"LICENSE", "pyproject.toml", "k8s/requirements.py"} <= kept
    assert all((ROOT / name).exists() for name in kept)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = packages["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {name.partition("/")[0] for name in wheel} <= kept
