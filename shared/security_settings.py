"""What services and clients can be told about encryption and identity; `shared.config` explains where the values come from."""

import argparse
from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class SecuritySettings(BaseSettings):
    """`tls_cert`, `tls_key`: PEM files, reloaded when they change; None: plain text. `tls_client_ca`: only clients with a
    certificate of it are let in. `auth_tokens`: file of bearer tokens and roles (`shared.rpc.tokens`); None: anybody may call.
    `allow_plaintext_tokens`: also without TLS beyond loopback. `health_listen`: HOST:PORT, plain text, health only; empty: none."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    auth_tokens: Path | None = None
    allow_plaintext_tokens: bool = False

    @field_validator("tls_cert", "tls_key", "tls_client_ca", "auth_tokens", mode="before")
    @classmethod
    def _none_if_empty(cls, value: Any) -> Any:
        return None if value == "" else value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self


class ClientSettings(BaseSettings):
    """How a client reaches services: variables NEAP_CLIENT_*, NEAP_TOKEN, NEAP_TOKEN_FILE and NEAP_ALLOW_PLAINTEXT_TOKENS.

    `tls`: with the authorities this machine trusts, or `ca` (which implies it, as `cert` does). `cert`, `key`: for mutual TLS.
    `server_name`: what the certificate must be for, where it is not the address called (through a port-forward, say).
    `token_file` is read anew for every call.
    """

    model_config = SettingsConfigDict(env_prefix="NEAP_CLIENT_", frozen=True, populate_by_name=True)

    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    token: SecretStr = Field(default=SecretStr(""), validation_alias="NEAP_TOKEN")
    token_file: Path | None = Field(default=None, validation_alias="NEAP_TOKEN_FILE")
    allow_plaintext_tokens: bool = Field(
        default=False, validation_alias="NEAP_ALLOW_PLAINTEXT_TOKENS"
    )

    @field_validator("ca", "cert", "key", "token_file", mode="before")
    @classmethod
    def _none_if_empty(cls, value: Any) -> Any:
        return None if value == "" else value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if self.token.get_secret_value() and self.token_file is not None:
            raise ValueError("token and token_file exclude one another")
        return self


def add_security_flags(parser: argparse.ArgumentParser) -> None:
    """The services' flags for `SecuritySettings`."""
    add = parser.add_argument
    add("--tls-cert", metavar="FILE", help="PEM certificate chain; reloaded when it changes")
    add("--tls-key", metavar="FILE", help="its private key")
    add("--tls-client-ca", metavar="FILE", help="let in only clients with a certificate of these")
    add("--auth-tokens", metavar="FILE", help="bearer tokens and roles (neap tokens create)")
    add("--allow-plaintext-tokens", action="store_const", const=True, help="without TLS, too")
    add("--health-listen", metavar="HOST:PORT", help="plain-text health checks, nothing else")
