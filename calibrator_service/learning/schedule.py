"""Makes routers learn from served traffic by themselves: a thread of the calibration service.

One of the services that share a registry acts for a model, by a lease. It looks at what workers have kept of each pool,
and creates a job like any other where the pool's rule says so. The job goes on from the pool's router, or from the
model's own where the pool has none yet. It is created only while no other job waits, so clients' jobs come first.

What it must remember is in the registry, as a note for each pool: a restart, or the next holder of the lease, goes on
with it.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import structlog
from neap_client.calibration.v1 import calibration_pb2

from calibrator_service.calibration.spec import ParentRouter, ServedTraffic
from calibrator_service.job import Job, JobState
from calibrator_service.jobs import JobStore
from calibrator_service.learning.pools import LATEST, latest_of, pool_of_source
from calibrator_service.learning.rule import LearningRule, PoolState
from calibrator_service.lineage import find_parent
from calibrator_service.metrics import CalibratorMetrics
from calibrator_service.service_thread import ServiceThread
from shared.calibrator_settings import CalibratorSettings
from shared.errors import Corrupt, NeapError, NotFound, PreconditionFailed
from shared.pool_names import check_pool
from shared.registry.contents import failed_checks
from shared.registry.lease import Lease
from shared.registry.names import learning_note
from shared.registry.registry import Registry
from shared.rpc.durations import duration_of
from shared.traffic.traffic import EXPIRE_EVERY_S, Batch, Traffic

# With an interval between jobs that is shorter, it looks as often as that, but no more than once in the second.
LOOK_INTERVAL_S, LEAST_LOOK_INTERVAL_S = 30.0, 1.0
# Failures of a job whose parent is the reason.
_PARENTS_FAULT = frozenset({"ROUTER_MISMATCH", "LAYOUT_MISMATCH", "PARENT_MISMATCH", "NO_STATISTICS", "CORRUPT"})

log = structlog.get_logger("neap.calibration")


class LearningSchedule:
    """`wake_queue`: called when there is a new job. `has_lost`: whether the version of a model's alias has lost
    acceptance. `thread`: a step looks at all models."""

    def __init__(
        self,
        registry: Registry,
        traffic: Traffic,
        store: JobStore,
        settings: CalibratorSettings,
        wake_queue: Callable[[], object],
        has_lost: Callable[[str, str], bool] = lambda model_id, alias: False,
        *,
        metrics: CalibratorMetrics,
    ) -> None:
        self._registry, self._traffic, self._store, self._settings = registry, traffic, store, settings
        self._wake_queue, self._has_lost, self._metrics = wake_queue, has_lost, metrics
        self._look_interval_s = min(LOOK_INTERVAL_S, max(settings.learn_interval_s, LEAST_LOOK_INTERVAL_S))
        self._rule = LearningRule(settings.learn_tokens, settings.learn_interval_s)
        self._leases = {model_id: registry.lease(learning_note(model_id)) for model_id in settings.sources}
        self._looked_s = self._expired_s = self._hold_at_s = float("-inf")
        # When each pool's last job began. Those that have waited longest come first, so none keeps others waiting.
        self._began_s: dict[tuple[str, str], float] = {}
        self.thread = ServiceThread("learning", self._look)

    def stop(self) -> None:
        """Waits for the step that runs, and lets another service act at once."""
        self.thread.stop()
        for lease in self._leases.values():
            lease.give_up()

    def _look(self) -> float:
        """Returns the seconds until the next look. Raises what registry and job store raise."""
        held = self._hold_all()
        now_s = time.monotonic()
        if held and now_s - self._expired_s >= EXPIRE_EVERY_S:
            self._expired_s = now_s
            removed = self._traffic.expire(86_400 * self._settings.traffic_days)
            if removed.num_objects:
                log.info("old answers removed", num_objects=removed.num_objects, num_bytes=removed.num_bytes)
        if now_s - self._looked_s >= self._look_interval_s:
            self._looked_s = now_s
            for model_id in held:
                for pool in self._in_turn(model_id):
                    if self.thread.stopping.is_set() or not self._acts_for(model_id):
                        break
                    try:
                        self.consider(model_id, check_pool(pool))
                    except NeapError as error:
                        log.warning("a pool is left for later", model_id=model_id, pool=pool, reason=error.reason)
        return min([self._look_interval_s, *(lease.renew_after_s for lease in self._leases.values())])

    def _in_turn(self, model_id: str) -> list[str]:
        return sorted(self._traffic.pools(model_id), key=lambda pool: self._began_s.get((model_id, pool), 0.0))

    def _hold_all(self) -> list[str]:
        """The models for which this service acts now, by leases taken or renewed."""
        self._hold_at_s = time.monotonic() + min((lease.renew_after_s for lease in self._leases.values()), default=0.0)
        return [model_id for model_id, lease in self._leases.items() if _hold(lease)]

    def _acts_for(self, model_id: str) -> bool:
        """A look at many pools takes longer than a lease lasts, so leases are renewed meanwhile."""
        if time.monotonic() >= self._hold_at_s:
            return model_id in self._hold_all()
        return self._leases[model_id].is_held

    def consider(self, model_id: str, pool: str) -> None:
        """Creates the job of a pool where it is due."""
        name = learning_note(model_id, pool)
        before = self._note(name)
        state = self._after_last_job(_state_of(before), model_id)
        if state.calibration_id:
            return
        # The interval first: what is kept may be millions of objects to list.
        batches = self._traffic.batches(model_id, pool) if state.may_begin(self._rule, time.time()) else []
        num_new = state.new_tokens(batches)
        self._metrics.learning_new_tokens.labels(model_id, pool).set(num_new)
        alias = latest_of(pool_of_source(ServedTraffic(pool)))
        has_lost = self._has_lost(model_id, alias)
        if state.is_due(self._rule, num_new, time.time(), has_lost=has_lost) and self._has_room(model_id, alias):
            why = f"{num_new} new tokens" + ", and drafts were accepted less often" * has_lost
            state = self._create(model_id, pool, replace(state, why=why), batches, alias)
            log.info("a pool learns", model_id=model_id, pool=pool, num_tokens=num_new, job=state.calibration_id)
        self._began_s[model_id, pool] = state.began_s
        rule = {"next_s": state.next_s(self._rule), "least_tokens": self._rule.least_tokens(has_lost=has_lost)}
        note = {"model_id": model_id, "pool": pool, **asdict(state), **rule}
        if note != before:
            self._registry.keep_note(name, note)

    def _has_room(self, model_id: str, alias: str) -> bool:
        """Whether no job waits, and the alias has no canary, beside which no other version could be tried."""
        change = self._registry.last_changes(model_id).get(alias)
        return (change is None or change.canary is None) and not self._store.in_state(JobState.QUEUED)

    def _note(self, name: str) -> dict[str, Any]:
        try:
            return self._registry.note(name) or {}
        except Corrupt as error:
            log.warning("a note of the schedule is damaged", note=name, problem=error.message)
            return {}

    def _after_last_job(self, state: PoolState, model_id: str) -> PoolState:
        """The state with the end of the last job, if that has ended. A job of another service, or one whose record is
        gone, counts as one that went well."""
        if not state.calibration_id:
            return state
        try:
            job = self._store.get(state.calibration_id)
        except NotFound:
            return replace(state, calibration_id="", outcome="")
        if not job.state.has_ended:
            return state
        self._metrics.learning_jobs.labels(model_id, job.state.value).inc()
        outcome = f"{job.state.value} {job.failure_reason or ''}".rstrip() + self._problem(job)
        state = replace(state, calibration_id="", outcome=outcome)
        if job.state is not JobState.FAILED:
            return replace(state, num_failed=0, is_alone=False)
        log.warning("a pool has not learned", calibration_id=job.calibration_id, reason=job.failure_reason)
        is_alone = job.failure_reason in _PARENTS_FAULT
        num_failed = state.num_failed + 1
        return replace(state, num_failed=num_failed, is_alone=is_alone, counted_s=0.0)

    def _problem(self, job: Job) -> str:
        """Why nobody is served with the version that a job has made, which is no failure of the job."""
        failed = []
        with suppress(NeapError):  # a version that has been deleted since
            if job.router_version:
                failed = failed_checks(self._registry.get(job.model_id, job.router_version).manifest)
        if not failed:
            return ""
        return f", but version {job.router_version} did not pass its checks ({', '.join(failed)}): no alias names it"

    def _create(self, model_id: str, pool: str, state: PoolState, batches: list[Batch], alias: str) -> PoolState:
        """Creates the job. Where this process is killed before its note is kept, the repetition finds that job."""
        newest_s = max(batch.stored.last_modified_s for batch in batches)
        parent = None if state.is_alone else self._parent(model_id, pool_of_source(ServedTraffic(pool)))
        spec = calibration_pb2.CalibrationSpec(
            model_id=model_id,
            served_traffic=calibration_pb2.ServedTraffic(pool=pool),
            time_budget=duration_of(self._settings.learn_budget_s, "the budget for learning"),
            aliases=[alias],
            parent=None if parent is None else calibration_pb2.ParentRouter(**asdict(parent)),
        )
        job = self._store.create(
            f"{learning_note(model_id, pool)}-{state.began_s}-{newest_s}",
            spec,
            max_queued=self._settings.max_queued_jobs,
        )
        self._wake_queue()
        job_id = job.calibration_id
        return replace(
            state, counted_s=newest_s, began_s=time.time(), calibration_id=job_id, last_job=job_id, outcome=""
        )

    def _parent(self, model_id: str, pool: str) -> ParentRouter | None:
        """The pool's router, else the model's own. None where neither can be gone on from."""
        for alias in dict.fromkeys((latest_of(pool), LATEST)):
            try:
                return find_parent(self._registry, model_id, ParentRouter(alias=alias), pool)
            except (NotFound, PreconditionFailed, Corrupt) as error:
                log.info("no parent", model_id=model_id, alias=alias, reason=error.reason)
        return None


def _hold(lease: Lease) -> bool:
    try:
        return lease.hold()
    except NeapError as error:
        log.warning("the lease cannot be asked for", reason=error.reason)
        return lease.is_held


def _state_of(note: dict[str, Any]) -> PoolState:
    """A note that another build has left counts as far as it is understood."""
    fields = asdict(PoolState())
    known = {name: note[name] for name, default in fields.items() if type(note.get(name)) is type(default)}
    return PoolState(**known)
