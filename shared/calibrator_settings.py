"""Settings of the calibration service."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from shared.process_settings import METRICS_LISTEN, METRICS_LISTEN_PATTERN, Listed, listed
from shared.security_settings import HEALTH_LISTEN
from shared.service_settings import ServiceSettings


class CalibratorSettings(ServiceSettings):
    """Settings of the calibration service."""

    listen: str = Field(
        default="127.0.0.1:7070",
        validation_alias="NEAP_CALIBRATOR_LISTEN",
        description="Address to listen on for gRPC. Port 0 picks a free port.",
    )
    health_listen: str = Field(default="", validation_alias="NEAP_CALIBRATOR_HEALTH_LISTEN", description=HEALTH_LISTEN)
    text_folders: Listed[Path] = Field(
        default=(),
        description="Folder from which a calibration may read text files. May be repeated; the variable takes a "
        "comma-separated list. Unset: no file may be read.",
        json_schema_extra={"metavar": "FOLDER"},
    )
    hub_datasets: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("*",),
        description="Dataset of the Hugging Face Hub that a calibration may read: a name or a pattern such as owner/*. "
        "* allows any public dataset; none, or an empty variable, forbids all datasets. May be repeated; the variable "
        "takes a comma-separated list.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    text_workers: Listed[str] = Field(
        default=(),
        description="Address of inference workers that may write a calibration's text, at low priority, if its request "
        "asks for that: HOST:PORT or any other form that gRPC accepts. Requests cannot name addresses. The variables "
        "NEAP_CLIENT_* and NEAP_TOKEN say how to connect. May be repeated; the variable takes a comma-separated list. "
        "Unset: the service writes all text itself.",
        json_schema_extra={"metavar": "ADDRESS"},
    )
    judge: Literal["off", "asked", "publications"] = Field(
        default="off",
        description="Judge router versions by what workers report (--report-to of a worker). asked: versions that an "
        "operator puts on trial (neap routers try), and those that serve. publications: also what calibrations "
        "publish: an alias that exists is not moved, but gets the version as a canary, which is promoted once it is "
        "found to be faster. One of several services of a registry judges.",
    )
    judge_first_share: float = Field(
        default=0.05,
        ge=0.001,
        le=0.5,
        description="With --judge: the share of requests that a version on trial begins with. It is compared in eight "
        "answers of it, so where few requests come a larger one decides sooner.",
    )
    max_queued_jobs: int = Field(
        default=16, ge=1, description="Most jobs that wait to be run. Further jobs are refused."
    )
    job_retention_days: float = Field(
        default=30.0,
        gt=0,
        description="Days after its end for which a job's record and log are kept; inf keeps them for ever. A job "
        "whose router is not published yet has not ended. Once a record is removed, its request id starts a new job.",
    )
    metrics_listen: str = Field(
        default="",
        pattern=METRICS_LISTEN_PATTERN,
        validation_alias="NEAP_CALIBRATOR_METRICS_LISTEN",
        description=METRICS_LISTEN,
    )
    learn_from_traffic: bool = Field(
        default=False,
        description="Learn from what workers keep of the answers that they serve (their --learn): per pool a job that "
        "goes on from the pool's router, again and again. One of several services with one registry does it.",
    )
    learn_tokens: int = Field(
        default=20_000,
        ge=1,
        description="With --learn-from-traffic: new tokens of a pool, prompts included, that begin a job.",
    )
    learn_interval_s: float = Field(
        default=1800.0,
        ge=0,
        description="With --learn-from-traffic: least seconds between the beginnings of two jobs of a pool.",
    )
    learn_budget_s: float = Field(
        default=150.0, gt=0, le=604_800, description="With --learn-from-traffic: seconds that such a job may take."
    )
    rank_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="Longest seconds for which a rank of a calibration by many processes waits for the others. Then "
        "the job is resumed from its files, as after a rank has died.",
    )
    max_time_budget_s: float = Field(
        default=604_800.0,
        gt=0,
        le=315_576_000_000,
        description="Longest duration in seconds that a job may ask for. Jobs that ask for more are refused. The "
        "default is a week.",
    )

    @field_validator("hub_datasets", mode="before")
    @classmethod
    def _datasets_from_text(cls, value: Any) -> Any:
        patterns = list(listed(value))
        if "none" in patterns and len(patterns) > 1:
            raise ValueError("none cannot be combined with names of datasets")
        return [] if "none" in patterns else patterns

    @model_validator(mode="after")
    def _learns_with_a_model(self) -> Self:
        if self.learn_from_traffic and not self.models:
            raise ValueError("to learn from traffic the service needs a model")
        return self
