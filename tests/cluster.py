"""Plays a cluster: workers as processes with addresses of their own, behind a name, replaced as a Deployment replaces
its pods.

`python -m tests.cluster OVERLAY COMPONENTS FOLDER` replays a rolling update and a scale-down of the rendered manifests
while clients stream, and prints what the clients saw as JSON. Inside a network namespace of its own (`in_namespace`),
the client resolves the name by the system's resolver, as in a pod. Elsewhere the addresses are on loopback and the DNS
server is named in the target.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from shared.errors import NeapError
from tests.dns_server import DnsServer, dns_server
from tests.forked_services import ForkedWorker
from tests.kustomize import environment, render, services

ROOT = Path(__file__).resolve().parents[1]
NAME = "neap-worker.neap.svc.cluster.local"
IN_NAMESPACE = "TESTS_CLUSTER_IN_NAMESPACE"
NUM_CLIENTS = 3
NUM_TOKENS = 300
READY_TIMEOUT_S = 200.0
# How long a cluster may take to remove a terminating pod from DNS.
DNS_DELAY_S = 2.0


def in_namespace() -> list[str]:
    """The command before which another command runs in a network namespace of its own.
    Empty where the system does not allow it."""
    command = ["unshare", "--map-root-user", "--net", "--mount"]
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return []
    return command if allowed.returncode == 0 else []


def set_up_namespace(folder: Path) -> None:
    """Brings loopback up, gives it the pods' addresses, and makes the system's resolver ask 127.0.0.1."""
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1\n")
    resolved = Path("/etc/resolv.conf").resolve()
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["ip", "route", "add", "local", "10.244.0.0/24", "dev", "lo"],
        ["mount", "--bind", str(folder / "resolv.conf"), str(resolved)],
    ):
        subprocess.run(command, check=True, capture_output=True)


@dataclass
class Pod:
    address: str
    process: ForkedWorker
    is_ready: bool = False
    is_terminating: bool = False


@dataclass
class Seen:
    """What the clients saw. `lost`: streams that ended with an error; `cut`: streams that ended well but without all
    tokens."""

    num_streams: int = 0
    num_during: int = 0
    lost: list[str] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    exit_statuses: list[int] = field(default_factory=list)
    slowest_exit_s: float = 0.0


class Deployment:
    """The workers of a rendering. `dns` names those that are ready."""

    def __init__(self, overlay: str, components: Sequence[str], folder: Path, dns: DnsServer):
        objects = render(overlay, components)
        self.spec = objects["Deployment", "neap-worker"]["spec"]
        self.container, self.pod_spec = services(objects)["worker"]
        self._variables = environment(objects, self.container)
        self._folder, self._dns = folder, dns
        self._prefix = "10.244.0." if os.environ.get(IN_NAMESPACE) else "127.0.1."
        self._num_started = 0
        self.pods: list[Pod] = []
        self.seen = Seen()
        self._ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def port(self) -> int:
        return int(self._ports["grpc"])

    def start(self) -> Pod:
        """A pod with the container's variables. Only the addresses, the model, the registry and the device are the
        test's own."""
        self._num_started += 1
        address = f"{self._prefix}{10 + self._num_started}"
        own = {
            "NEAP_WORKER_LISTEN": f"{address}:{self._ports['grpc']}",
            "NEAP_WORKER_HEALTH_LISTEN": f"{address}:{self._ports['health']}",
            "NEAP_METRICS_LISTEN": f"{address}:{self._ports['metrics']}",
            "NEAP_MODELS": f"tiny={self._folder / 'model'}",
            "NEAP_DATA_DIR": str(self._folder / f"data-{self._num_started}"),
            "NEAP_REGISTRY": str(self._folder / "registry"),
            "NEAP_DEVICE": "cpu",
            "NEAP_DTYPE": "float32",
            "NEAP_THREADS": "1",
            "NEAP_RECORD_PASSES": "auto",
            "NEAP_COMPILE_LAYERS": "auto",
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("NEAP_")}
        with (self._folder / f"log-{self._num_started}").open("wb") as log:
            variables = {**inherited, **self._variables, **own, "HOME": str(self._folder)}
            process = ForkedWorker([], variables, errors=log, output=log)
        pod = Pod(address, process)
        self.pods.append(pod)
        return pod

    def probe(self) -> None:
        """What the kubelet and the endpoint controller do: the readiness probe, and the addresses behind the name."""
        probe = self.container["readinessProbe"]["grpc"]
        for pod in self.pods:
            if not (pod.is_ready or pod.is_terminating):
                assert pod.process.poll() is None, "a worker has ended"
                pod.is_ready = serves(f"{pod.address}:{probe['port']}", probe["service"])
        self._dns.addresses = [pod.address for pod in self.pods if pod.is_ready]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        while not condition():
            assert time.monotonic() < give_up_s, "the workers are not ready in time"
            time.sleep(0.1)
            self.probe()

    def num_available(self) -> int:
        return sum(pod.is_ready and not pod.is_terminating for pod in self.pods)

    def terminate(self, pod: Pod) -> None:
        """SIGTERM, removal from DNS a little later, and the end within the pod's grace period."""
        pod.is_terminating = True
        pod.process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        time.sleep(DNS_DELAY_S)
        pod.is_ready = False
        self.probe()
        status = pod.process.wait(self.pod_spec["terminationGracePeriodSeconds"])
        self.seen.slowest_exit_s = max(self.seen.slowest_exit_s, time.monotonic() - began_s)
        self.seen.exit_statuses.append(status)
        self.pods.remove(pod)

    def roll(self) -> None:
        """Replaces every pod within maxSurge and maxUnavailable, as the Deployment's controller does."""
        rolling = self.spec["strategy"]["rollingUpdate"]
        replicas = len(self.pods)
        old = list(self.pods)
        while old or len(self.pods) < replicas:
            while len(self.pods) < replicas + rolling["maxSurge"] and (len(self.pods) - len(old) < replicas):
                self.start()
            enough = replicas - rolling["maxUnavailable"]
            if old:
                self.wait_for(lambda at_least=enough: self.num_available() > at_least)
                self.terminate(old.pop(0))
        self.wait_for(lambda: self.num_available() == replicas)

    def kill_all(self) -> None:
        for pod in self.pods:
            pod.process.kill()
            pod.process.wait()


def serves(address: str, service: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=1)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def stream(client: NeapClient, seen: Seen, over: threading.Event, rolling: threading.Event) -> None:
    request = pb.GenerateRequest(
        model_id="tiny",
        text="hello",
        depth=pb.DepthPolicy(full=pb.Full()),
        stopping=pb.Stopping(max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    while not over.is_set():
        try:
            *_, last = client.generate(request)
        except NeapError as error:
            seen.lost.append(f"{error.reason}: {error.message}")
            continue
        seen.num_streams += 1
        seen.num_during += rolling.is_set()
        if last.finished.usage.num_completion_tokens != NUM_TOKENS:
            seen.cut.append(last.finished.usage.num_completion_tokens)


def replay(overlay: str, components: Sequence[str], folder: Path) -> Seen:
    is_own = bool(os.environ.get(IN_NAMESPACE))
    if is_own:
        set_up_namespace(folder)
    with ExitStack() as stack:
        dns = stack.enter_context(dns_server(port=53 if is_own else 0))
        deployment = Deployment(overlay, components, folder, dns)
        stack.callback(deployment.kill_all)
        for _ in range(deployment.spec.get("replicas", 2)):
            deployment.start()
        deployment.wait_for(lambda: deployment.num_available() == len(deployment.pods))
        name = f"{NAME}:{deployment.port}"
        target = name if is_own else f"dns://127.0.0.1:{dns.port}/{name}"
        client = stack.enter_context(NeapClient(target))
        over, rolling = threading.Event(), threading.Event()
        arguments: tuple[Any, ...] = (client, deployment.seen, over, rolling)
        threads = [threading.Thread(target=stream, args=arguments) for _ in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            rolling.set()
            deployment.roll()
            deployment.terminate(deployment.pods[0])  # and scaled down
            rolling.clear()
        finally:
            over.set()
            for thread in threads:
                thread.join(120)
        return deployment.seen


if __name__ == "__main__":
    found = replay(sys.argv[1], sys.argv[2].split(",") if sys.argv[2] else (), Path(sys.argv[3]))
    print(json.dumps(vars(found)))
