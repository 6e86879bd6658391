"""Lets inference workers write a calibration's text over gRPC, at low priority.
What they leave is written by this process."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

import structlog
from neap_client import ClientSecurity, NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.methods import GENERATE
from neap_client.requests import generate_request
from neap_client.sync_generation import GenerationStream

from calibrator_service.calibration.text.writer import (
    NUCLEUS_CANDIDATES,
    Pace,
    Writer,
    WriteRequest,
    Written,
    WrittenAnswer,
)
from shared.config import make_settings
from shared.errors import Cancelled, NeapError, PreconditionFailed
from shared.model.loaded import LoadedModel
from shared.security_settings import ClientSettings

# Answers that one worker writes at a time. Others' requests may have to wait until one of these has ended.
ROWS_PER_WORKER = 8
# The proto's priority of work that nobody waits for.
FOR_NOBODY = 100
POLL_S = 0.1
UNARY_TIMEOUT_S = 10.0

log = structlog.get_logger("neap.calibration")


def fleet_of(addresses: Sequence[str], loaded: LoadedModel) -> Callable[[Writer], Writer]:
    """Makes a writer of these workers from the one that takes over what they leave. They are called as the settings of
    a client say. Raises InvalidInput (BAD_CONFIGURATION)."""
    security = make_settings(ClientSettings).client_security()
    return lambda local: FleetWriter(addresses, loaded, local, security)


class FleetWriter:
    """A `Writer`. A worker that does not answer, drains or fails is left out from then on; its requests go to the
    others, and without any to `local`. `write` raises `PreconditionFailed` (WORKER_HAS_OTHER_MODEL) if a worker serves
    another model under the same id.

    Workers may compute in another format than the model here, so no answer counts as the model's own choice.
    """

    def __init__(
        self, addresses: Sequence[str], loaded: LoadedModel, local: Writer, security: ClientSecurity | None = None
    ) -> None:
        self._loaded, self._local = loaded, local
        self._addresses = tuple(addresses)
        self._security = security
        self._workers: list[_Worker] | None = None

    @property
    def num_workers(self) -> int:
        """Workers that are not lost."""
        return sum(not worker.is_lost for worker in self._workers or ())

    def write(self, next_request: Callable[[], WriteRequest | None], pace: Pace) -> Iterator[Written]:
        """See `Writer`. Raises also what `local` raises."""
        if self._workers is None:
            self._workers = [_Worker(name, self._loaded, self._security) for name in self._addresses]
            for worker in self._workers:
                worker.check()
        again: deque[WrittenAnswer] = deque()
        num_requests = 0

        def next_answer() -> WrittenAnswer | None:
            """The next one to write, with its place among all."""
            nonlocal num_requests
            if again:
                return again.popleft()
            if (request := next_request()) is None:
                return None
            num_requests += 1
            return WrittenAnswer(num_requests - 1, request)

        yield from self._by_workers(next_answer, again, pace)
        if pace.is_late():
            return
        order: list[int] = []

        def next_local() -> WriteRequest | None:
            if (answer := next_answer()) is None:
                return None
            order.append(answer.index)
            return answer.request

        if self._addresses and not self.num_workers:
            log.warning("no worker is left that writes text, so this process writes it")
        for written in self._local.write(next_local, pace):
            yield replace(written, index=order[written.index])

    def idle(self) -> AbstractContextManager[None]:
        return self._local.idle()

    def close(self) -> None:
        for worker in self._workers or ():
            worker.close()
        self._workers = None
        self._local.close()

    def _by_workers(
        self, next_answer: Callable[[], WrittenAnswer | None], again: deque[WrittenAnswer], pace: Pace
    ) -> Iterator[Written]:
        """Until no request or no worker is left. Requests of lost workers are put into `again`."""
        workers = self._workers or []
        running: set[_RemoteAnswer] = set()
        ended: queue.SimpleQueue[_RemoteAnswer] = queue.SimpleQueue()
        num_counted, is_late = 0, False
        with ThreadPoolExecutor(max(1, ROWS_PER_WORKER * len(workers)), "neap-fleet") as pool:
            try:
                while True:
                    for worker in () if is_late else workers:
                        while worker.has_room and (answer := next_answer()) is not None:
                            remote = _RemoteAnswer(worker, answer)
                            running.add(remote)
                            pool.submit(remote.run, ended)
                    if not running:
                        return
                    if pace.should_stop():
                        raise Cancelled("stopped while workers wrote text")
                    if not is_late and pace.is_late():
                        is_late = True
                        for remote in running:
                            remote.cancel()
                    ready: _RemoteAnswer | None = None
                    with suppress(queue.Empty):
                        ready = ended.get(timeout=POLL_S)
                    total = sum(len(remote.answer.tokens) for remote in running)
                    pace.on_tokens(max(total - num_counted, 0))
                    num_counted = total
                    if ready is None:
                        continue
                    running.remove(ready)
                    ready.worker.num_running -= 1
                    num_counted -= len(ready.answer.tokens)
                    if ready.is_whole or is_late:
                        yield Written(ready.answer.index, tuple(ready.answer.tokens), False)
                    else:
                        again.append(WrittenAnswer(ready.answer.index, ready.answer.request))
            finally:
                for remote in running:
                    remote.cancel()
                    remote.worker.num_running -= 1


class _Worker:
    """One address. `num_running`: requests that it answers now."""

    def __init__(self, address: str, loaded: LoadedModel, security: ClientSecurity | None) -> None:
        self.address, self.loaded = address, loaded
        self.client = NeapClient(
            address, security=security, timeout_s=UNARY_TIMEOUT_S, num_attempts=2, health_service=GENERATE.service
        )
        self.is_lost, self.num_running = False, 0

    @property
    def has_room(self) -> bool:
        return not self.is_lost and self.num_running < ROWS_PER_WORKER

    def check(self) -> None:
        """Raises PreconditionFailed (WORKER_HAS_OTHER_MODEL). A worker that cannot say what it serves is lost."""
        try:
            model = self.client.get_model(self.loaded.model_id)
        except NeapError as error:
            self.lose(error)
            return
        ours = (self.loaded.fingerprint, self.loaded.context_length)
        if model.fingerprint != ours[0] or model.context_length < ours[1]:
            raise PreconditionFailed(
                f"the worker {self.address} serves another model, or one with a shorter context, as "
                f"{self.loaded.model_id}",
                reason="WORKER_HAS_OTHER_MODEL",
                metadata={"worker": self.address, "fingerprint": model.fingerprint},
            )

    def lose(self, error: NeapError) -> None:
        if not self.is_lost:
            log.warning("a worker is lost", worker=self.address, reason=error.reason)
        self.is_lost = True

    def close(self) -> None:
        self.client.close()


class _RemoteAnswer:
    """An answer that a worker writes. `run` is called by a thread of its own."""

    def __init__(self, worker: _Worker, answer: WrittenAnswer) -> None:
        self.worker, self.answer = worker, answer
        self.is_whole = False
        self._stream: GenerationStream | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()
        worker.num_running += 1

    def run(self, ended: "queue.SimpleQueue[_RemoteAnswer]") -> None:
        """Reads the answer, up to its end or until it is in a loop."""
        try:
            self._read()
        except NeapError as error:
            if not self._is_cancelled:
                self.worker.lose(error)
        except Exception:
            log.exception("an answer could not be read", worker=self.worker.address)
            self.worker.is_lost = True
        finally:
            ended.put(self)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._stream is not None:
                self._stream.close()

    def _read(self) -> None:
        with self._lock:
            if self._is_cancelled:
                return
            self._stream = self.worker.client.generate(self._request())
        with self._stream as stream:
            for event in stream:
                self.answer.add([token.id for token in event.chunk.tokens])
                if self.answer.is_over or event.HasField("finished"):
                    self.is_whole = True
                    return

    def _request(self) -> pb.GenerateRequest:
        asked = self.answer.request
        is_sampled = asked.temperature > 0.0
        return generate_request(
            self.worker.loaded.model_id,
            pb.TokenIds(ids=asked.prompt),
            policy="full",
            max_tokens=asked.max_new_tokens,
            stop_token_ids=sorted(asked.stop_ids),
            temperature=asked.temperature if is_sampled else None,
            top_k=NUCLEUS_CANDIDATES if is_sampled else None,
            top_p=asked.top_p if is_sampled else None,
            seed=asked.seed if is_sampled else None,
            priority=FOR_NOBODY,
            learn="never",
        )
