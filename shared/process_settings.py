"""Settings that every process which serves has. `shared.config` explains where the values come from."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode

METRICS_LISTEN = (
    "Address for Prometheus metrics over HTTP, in plain text. Port 0 picks a free port. Unset: metrics are not served."
)
METRICS_LISTEN_PATTERN = r"^$|^.+:[0-9]+$"
T = TypeVar("T")


def listed(value: Any) -> Any:
    """Split a comma-separated string into a list. Other values are returned unchanged."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


# Several values; a variable has them as a comma-separated list.
Listed = Annotated[tuple[T, ...], NoDecode, BeforeValidator(listed)]


class ProcessSettings(BaseSettings):
    """Settings of both services and of the gateway."""

    grace_s: float = Field(
        default=2.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after SIGTERM during which new calls are still accepted, while health checks already "
        "answer NOT_SERVING.",
    )
    drain_timeout_s: float = Field(
        default=60.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that running calls then get to finish. Calls that are still running afterwards end with "
        "UNAVAILABLE (SHUTTING_DOWN).",
    )
    request_timeout_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds within which an opened call must send its request message. A call that does not is ended "
        "(REQUEST_TIMEOUT).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level of log lines that are written."
    )
    otel_endpoint: str = Field(
        default="",
        validation_alias=AliasChoices("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        description="URL of the collector to which traces are exported. Unset: traces are not exported.",
    )
    otel_protocol: str = Field(
        default="",
        validation_alias=AliasChoices("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
        description="Protocol of the export. Only grpc is supported. Unset: grpc.",
    )
    otel_exporter: str = Field(
        default="",
        validation_alias="OTEL_TRACES_EXPORTER",
        description="Exporter of traces: otlp, or none to switch the export off. Unset: otlp.",
    )
    otel_disabled: str = Field(
        default="", validation_alias="OTEL_SDK_DISABLED", description="true switches the export of traces off."
    )

    @property
    def exports_traces(self) -> bool:
        """Whether spans are exported: a collector is named and no variable switches the export off."""
        off = self.otel_disabled.lower() == "true" or self.otel_exporter == "none"
        return bool(self.otel_endpoint) and not off

    @model_validator(mode="after")
    def _can_export(self) -> Self:
        if self.exports_traces and (self.otel_exporter not in ("", "otlp") or self.otel_protocol not in ("", "grpc")):
            raise ValueError("traces can be exported only with otlp over grpc")
        return self
