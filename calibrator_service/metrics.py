"""The Prometheus metrics of a calibration service, described in docs/metrics.md."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import structlog
from prometheus_client import GCCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from calibrator_service.job import Job, JobState
from calibrator_service.jobs import JobCount, JobStore
from calibrator_service.judge.watch import Alarm
from shared.errors import NeapError
from shared.service_metrics import ServiceMetrics

DURATION_BOUNDS_S = (30, 60, 120, 180, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)

log = structlog.get_logger("neap.calibration")


class CalibratorMetrics(ServiceMetrics):
    """One registry with the metrics of jobs, their queue and this process. Safe to use from any thread.

    The number of label values is bounded: models that were configured when a job was created, states, phases, and error
    reasons.
    """

    def __init__(self) -> None:
        super().__init__()
        GCCollector(registry=self.registry)
        self.process_deaths = self.counter(
            "neap_calibration_process_deaths",
            "Processes of jobs that died by themselves; not those that this service stopped or that died with it.",
            ["model_id"],
        )
        self.publications = self.counter(
            "neap_calibration_publications", "Jobs that ended with a published router version.", ["model_id"]
        )
        self.failures = self.counter(
            "neap_calibration_failures", "Jobs that failed, by the reason of their failure.", ["model_id", "reason"]
        )
        self.duration = self.histogram(
            "neap_calibration_duration_seconds",
            "From a job's creation until its end, time in the queue included, by how it ended.",
            ["model_id", "state"],
            buckets=DURATION_BOUNDS_S,
        )
        self.judge_acts = self.gauge(
            "neap_judge_acts", "1 while this calibrator judges versions; 0: another one does, or none."
        )
        self.served_reports = self.counter(
            "neap_judge_reports", "Workers' reports: taken, late (they had come before), or refused.", ["outcome"]
        )
        self.verdicts = self.counter(
            "neap_judge_verdicts",
            "Steps that the judge took: grow, promote, roll_back, no_difference, silent.",
            ["model_id", "outcome"],
        )
        self.learning_new_tokens = self.gauge(
            "neap_learning_new_tokens",
            "Tokens of a pool that no job has learned from, at the last look; 0 while its interval lasts.",
            ["model_id", "pool"],
        )
        self.learning_jobs = self.counter(
            "neap_learning_jobs",
            "Jobs that learned from a pool's answers and have ended, by how.",
            ["model_id", "state"],
        )
        self.alarms = self.counter(
            "neap_judge_alarms",
            "Alarms about the version that an alias names: slower_than_full, lost_acceptance.",
            ["model_id", "alarm"],
        )

    def observe(
        self, model_ids: Iterable[str], store: JobStore, is_alive: Callable[[], bool], is_held_up: Callable[[], bool]
    ) -> None:
        """Adds the metrics of a supervisor. The series that alerts ask about are there at 0 from the start: one that is
        born at 1 has not increased."""
        for model_id in model_ids:
            self.process_deaths.labels(model_id)
            for reason in ("INTERNAL", "DISK_FULL", "JOB_PROCESS_DIED"):
                self.failures.labels(model_id, reason)
            for alarm in Alarm:
                self.alarms.labels(model_id, alarm)
        self.registry.register(_QueueCollector(store, is_alive, is_held_up))

    def count_ended_job(self, job: Job) -> None:
        """Counts a job that this service has run and that has ended."""
        if job.end_time_s is not None:
            seconds = max(job.end_time_s - job.create_time_s, 0.0)
            self.duration.labels(job.model_id, job.state).observe(seconds)
        if job.state is JobState.SUCCEEDED:
            self.publications.labels(job.model_id).inc()
        elif job.state is JobState.FAILED:
            self.failures.labels(job.model_id, job.failure_reason).inc()


class _QueueCollector(Collector):
    """Reads the queue and the job store at each scrape. If the store cannot be read, its metrics are left out."""

    def __init__(self, store: JobStore, is_alive: Callable[[], bool], is_held_up: Callable[[], bool]) -> None:
        self._store, self._is_alive, self._is_held_up = store, is_alive, is_held_up

    def describe(self) -> list[Metric]:
        """Empty, so that registering the collector does not read the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "neap_calibration_queue_up",
            "1 while the thread that runs the jobs is alive.",
            value=float(self._is_alive()),
        )
        yield GaugeMetricFamily(
            "neap_calibration_queue_held_up",
            "1 while the queue cannot go on, because the disk is full or the job store cannot be had.",
            value=float(self._is_held_up()),
        )
        try:
            counts = self._store.count_jobs()
            running = self._store.in_state(JobState.RUNNING)
        except NeapError as error:
            log.warning("jobs cannot be counted", reason=error.reason)
            return
        yield from _of_counts(counts)
        progress = GaugeMetricFamily(
            "neap_calibration_progress_ratio",
            "Share of a running job's work that is done, by the phase it is in.",
            labels=["model_id", "phase"],
        )
        for job in running:
            progress.add_metric([job.model_id, job.phase], job.fraction)
        yield progress


def _of_counts(counts: Sequence[JobCount]) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("neap_calibration_jobs", "Jobs on record, by state.", labels=["model_id", "state"])
    waiting = GaugeMetricFamily("neap_calibration_queue_length", "Jobs that wait for their turn.", labels=["model_id"])
    resumes = CounterMetricFamily(
        "neap_calibration_resumes",
        "Starts of jobs that had been started before, over all jobs on record.",
        labels=["model_id"],
    )
    for model_id in sorted({count.model_id for count in counts}):
        of_model = [count for count in counts if count.model_id == model_id]
        for count in of_model:
            if not count.num_jobs:  # jobs that were removed
                continue
            jobs.add_metric([model_id, count.state], count.num_jobs)
        num_waiting = sum(count.num_jobs for count in of_model if count.state == JobState.QUEUED)
        waiting.add_metric([model_id], num_waiting)
        resumes.add_metric([model_id], sum(count.num_resumes for count in of_model))
    yield from (jobs, waiting, resumes)
