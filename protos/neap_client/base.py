"""What the synchronous and the asynchronous client have in common."""

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict, Unpack

from neap_client import methods
from neap_client.affinity import WORKER_KEY, KnownWorkers, prefix_key
from neap_client.channel import (
    AUTHORIZATION_KEY,
    REQUEST_ID_KEY,
    ClientSecurity,
    Metadata,
    RenewedChannel,
    trace_context,
)
from neap_client.errors import NeapError, Unavailable
from neap_client.generation import OnStarted, Resumes
from neap_client.inference.v1 import inference_pb2
from neap_client.methods import Method
from neap_client.retry import Attempts, WatchAttempts, is_unavailable

POLL_S = 0.1


class ChangeOptions(TypedDict, total=False):
    """How to change an alias. With `expected_version` it is a compare-and-swap; None means none.
    `actor` and `reason` go into the history."""

    expected_version: int | None
    actor: str
    reason: str


class WatchOptions(TypedDict, total=False):
    """How long to watch. A watch that has begun ends with an error only after `timeout_s`; None, as if absent, is no
    limit.

    `on_lost` gets the error whenever a watch loses the service, before it waits for the service to come back.
    """

    timeout_s: float | None
    on_lost: Callable[[NeapError], object]


class ClientBase:
    """A client of one target, which may be a worker, a calibrator, or both.

    `target` is HOST:PORT or any other form that gRPC accepts; a port is needed. Calls are shared in turn among all
    addresses of a name, or of a list such as "ipv4:10.0.0.7:7071,10.0.0.8:7071"; addresses that do not answer are left
    out. With `health_service`, so are those whose health check of this service ("" for the whole server) does not say
    SERVING, because they load or drain. With `has_affinity`, generations whose prompts begin alike go to the same
    address while it has room and not much more than its share of the client's calls, because it has read the beginning
    before. `timeout_s` is the deadline of every unary call. `num_attempts` includes the first attempt. Unless
    `waits_when_full`, a generation that a full service refuses is not repeated after the service's retry delay.
    `resumes`: whether an answer that its worker interrupts is resumed by another one: "always", "exactly" (only if it
    goes on with the same numerics), or "never". So is one whose worker brings nothing for `stall_timeout_s`, once the
    answer has begun. Without `security` the connection is plain text and has no token. Raises InvalidInput as
    `open_channel` does.

    Every method raises NeapError as the service raised it (`neap_client.status.from_rpc_error`). On UNAVAILABLE the
    client repeats only calls that are safe to repeat: unary calls that change nothing or are idempotent by id, and
    generations, which go on after the tokens that they have returned. A watch that has begun goes on where it was,
    however long the service is away (see WatchOptions).
    """

    def __init__(
        self,
        target: str,
        *,
        security: ClientSecurity | None = None,
        timeout_s: float = 30.0,
        num_attempts: int = 4,
        waits_when_full: bool = True,
        health_service: str | None = None,
        resumes: Resumes = "always",
        has_affinity: bool = True,
        stall_timeout_s: float = 20.0,
    ) -> None:
        self.target = target
        self._security = security or ClientSecurity()
        self._timeout_s = timeout_s
        self._num_attempts = num_attempts
        self._waits_when_full = waits_when_full
        self._resumes = resumes
        self._stall_timeout_s = stall_timeout_s
        self._health_service = health_service
        self._is_closed = False
        self._channel: RenewedChannel[Any] = RenewedChannel(self._security, self._open_channel)
        self._channels = [self._channel]
        self._known: KnownWorkers | None = None
        if has_affinity:
            self._known = KnownWorkers(target)
            by_address = partial(self._open_channel, True)
            self._channels.append(RenewedChannel(self._security, by_address))

    def _open_channel(self, by_address: bool = False) -> Any:
        raise NotImplementedError

    def _start(
        self, method: Method[Any, Any], request: Any, metadata: Metadata = (), timeout_s: float | None = None
    ) -> Any:
        """Call a method with one response. Returns the response, or with asyncio an awaitable of it.
        `timeout_s`: None means the client's."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        call = method.unary(self._channel.current())
        return call(request, timeout=timeout_s, metadata=self._metadata(metadata))

    def _start_stream(
        self, method: Method[Any, Any], request: Any, metadata: Metadata = (), timeout_s: float | None = None
    ) -> Any:
        """Call a method with a stream of responses. `timeout_s`: None means no deadline. With WORKER_KEY in `metadata`,
        its value is the address."""
        is_addressed = any(key == WORKER_KEY for key, _ in metadata)
        call = method.stream(self._channels[is_addressed].current())
        return call(request, timeout=timeout_s, metadata=self._metadata(metadata))

    def _metadata(self, metadata: Metadata) -> Metadata:
        """Return the metadata of one call. Raises InvalidInput if the token cannot be read."""
        token = self._security.read_token()
        authorization = ((AUTHORIZATION_KEY, f"Bearer {token}"),) if token else ()
        return (*authorization, *trace_context().items(), *metadata)

    def _attempts(self, method: Method[Any, Any]) -> Attempts:
        return Attempts(is_unavailable, num_attempts=self._num_attempts if method.repeatable else 1)

    def _watch_attempts(self, **options: Unpack[WatchOptions]) -> WatchAttempts:
        return WatchAttempts(self._num_attempts, options.get("timeout_s"), options.get("on_lost", lambda _: None))

    def _not_ready(self, timeout_s: float) -> Unavailable:
        return Unavailable(f"{self.target} is not serving after {timeout_s:g} s", reason="NOT_READY")

    def _generation(
        self,
        request: inference_pb2.GenerateRequest | bytes,
        timeout_s: float | None,
        request_id: str | None,
        metadata: Metadata,
        prefix: str | None,
        on_started: OnStarted | None,
        keeps: bool,
    ) -> dict[str, Any]:
        """Return the arguments of a generation's stream.
        All attempts have the same request id; None makes a new one."""
        common = ((REQUEST_ID_KEY, request_id or secrets.token_hex(8)), *metadata)
        if prefix is None and not isinstance(request, bytes):
            prefix = prefix_key(request)

        def open_call(asked: bytes, left_s: float | None, address: str) -> Any:
            addressed = ((WORKER_KEY, f"{address}_0"), *common) if address else common
            call = self._start_stream(methods.GENERATE, asked, addressed, left_s)
            if address and self._known:
                self._known.count(address, call)
            return call

        return {
            "open_call": open_call,
            "request": request if isinstance(request, bytes) else request.SerializeToString(),
            "addresses": self._known.ranked(prefix or "") if self._known else [],
            "resumes": self._resumes,
            "stall_timeout_s": self._stall_timeout_s,
            "num_attempts": self._num_attempts,
            "timeout_s": timeout_s,
            "waits_when_full": self._waits_when_full,
            "on_started": on_started,
            "keeps": keeps,
        }
