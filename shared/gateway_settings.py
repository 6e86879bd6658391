"""Settings of the HTTP gateway. `shared.config` explains where the values come from."""

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from shared.process_settings import METRICS_LISTEN, METRICS_LISTEN_PATTERN, Listed, ProcessSettings
from shared.security_settings import OptionalFile, TlsSettings


class GatewaySettings(ProcessSettings, TlsSettings):
    """Settings of the gateway."""

    model_config = SettingsConfigDict(env_prefix="NEAP_GATEWAY_", frozen=True, extra="forbid", populate_by_name=True)

    listen: str = Field(
        default="127.0.0.1:8080",
        description="Address to listen on for HTTP, or for HTTPS with a certificate. Port 0 picks a free port.",
    )
    metrics_listen: str = Field(default="", pattern=METRICS_LISTEN_PATTERN, description=METRICS_LISTEN)
    workers: str = Field(
        default="127.0.0.1:7071",
        min_length=1,
        description="gRPC target of the workers: HOST:PORT, dns:///HOST:PORT for a name with several addresses, or "
        "ipv4:ADDRESS:PORT,ADDRESS:PORT. Requests go to the addresses that serve. All workers must serve the same "
        "models.",
        json_schema_extra={"metavar": "TARGET"},
    )
    prefix_affinity: bool = Field(
        default=True,
        description="Send requests whose prompts begin alike to the same worker while it has room, because it has read "
        "the beginning before. Otherwise requests go to the workers in turn.",
    )
    worker_tls: bool = Field(
        default=False,
        description="Encrypt calls to the workers with TLS and trust the authorities that this machine trusts.",
    )
    worker_ca: OptionalFile = Field(
        default=None,
        description="PEM file of the authorities of the workers' certificates; reloaded when it changes. Implies TLS. "
        "Unset: those that this machine trusts.",
    )
    worker_cert: OptionalFile = Field(
        default=None,
        description="PEM file of the gateway's certificate for workers that ask for one; reloaded when it changes. "
        "Implies TLS. Unset: the gateway shows no certificate.",
    )
    worker_key: OptionalFile = Field(default=None, description="PEM file with the private key of that certificate.")
    worker_server_name: str = Field(
        default="",
        description="Name that the workers' certificates must be valid for. Unset: the name in the target.",
        json_schema_extra={"metavar": "NAME"},
    )
    drop_tokens: bool = Field(
        default=False,
        description="Do not pass the bearer tokens of clients on, because the workers need none. Unset: they are "
        "passed on.",
    )
    allow_plaintext_tokens: bool = Field(
        default=False,
        validation_alias="NEAP_ALLOW_PLAINTEXT_TOKENS",
        description="Pass tokens on to workers without TLS beyond loopback, because something else encrypts the "
        "connection.",
    )
    max_requests: int = Field(
        default=512,
        ge=1,
        description="Most HTTP requests to the API at once, counted once their body has arrived. Further ones are "
        "refused with 429 (GATEWAY_FULL). A client may have as many as it leaves free, so alone at most half "
        "(CLIENT_LIMIT). A client is a token or, if the workers need none, an address.",
    )
    max_choices: int = Field(
        default=128,
        ge=1,
        le=1024,
        description="Most choices of one HTTP request: n times the number of prompts. Each choice is a call to a "
        "worker; 16 of a request run at once.",
    )
    generation_defaults: Literal["model", "openai"] = Field(
        default="model",
        description="What holds for a temperature, top_k, top_p, min_p, repetition_penalty or limit of tokens that a "
        "request leaves open: what the model's generation_config states, or OpenAI's defaults alone.",
    )
    max_body_mb: int = Field(
        default=4,
        ge=1,
        le=15,
        description="Largest body of an HTTP request in MiB. Larger ones are refused with 413 (BODY_TOO_LARGE).",
    )
    body_budget_mb: int = Field(
        default=256,
        ge=2,
        description="MiB for all bodies together: the bytes that have arrived, then the bytes of each prompt once for "
        "each of its choices, and what has come of answers that are not streamed. What would exceed it is refused with "
        "429 (GATEWAY_FULL). It is divided among clients as places are. At least twice max_body_mb.",
    )
    generation_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="Seconds that one HTTP request may take. It then ends with 504 (DEADLINE_EXCEEDED).",
    )
    stall_timeout_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds for which a client may stop reading. Its connection is then closed and its calls are "
        "cancelled (SLOW_READER).",
    )
    idle_timeout_s: int = Field(
        default=75,
        ge=1,
        le=86_400,
        description="Seconds for which a connection without a request stays open. A proxy in front should close idle "
        "connections earlier than that.",
    )
    cors_origins: Listed[str] = Field(
        default=(),
        description="Origin of web pages that may use the API, such as https://chat.example.com; * allows all. May be "
        "repeated; the variable takes a comma-separated list. Unset: pages of the gateway's own host only. Programs "
        "that are no browsers have no origin.",
        json_schema_extra={"metavar": "ORIGIN"},
    )
    worker_stall_timeout_s: float = Field(
        default=20.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds for which a worker may bring nothing of an answer that has begun. The answer is then "
        "resumed at another worker.",
    )
    resumes: Literal["always", "exactly", "never"] = Field(
        default="always",
        description="Whether an answer whose worker dies or stops is resumed at another one: always, only where its "
        "tokens are those of an uninterrupted run (else it ends with NUMERICS_DIFFER), or never.",
    )
    num_attempts: int = Field(
        default=3,
        ge=1,
        le=10,
        description="How often a call is made, at most, while no worker answers. With more than 1, an answer whose "
        "worker dies or stops is resumed at another one.",
    )

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if (self.worker_cert is None) != (self.worker_key is None):
            raise ValueError("worker_cert and worker_key must be given together")
        if self.body_budget_mb < 2 * self.max_body_mb:
            raise ValueError("body_budget_mb must be at least twice max_body_mb")
        return self
