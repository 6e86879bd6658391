"""Settings of services and clients for encryption and identity. `shared.config` explains where the values come from."""

from pathlib import Path
from typing import Annotated, Self

from neap_client.channel import ClientSecurity
from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

# Each service declares this field itself because its variable differs. The description is shared.
HEALTH_LISTEN = (
    "Second address, in plain text, that answers health checks and nothing else, for probes without certificate or "
    "token. Unset: no second address."
)

# A file, or None for an empty variable.
OptionalFile = Annotated[Path | None, BeforeValidator(lambda value: None if value == "" else value)]


class TlsSettings(BaseSettings):
    """Encryption of both services and of the gateway."""

    tls_cert: OptionalFile = Field(
        default=None,
        description="PEM file with the certificate chain of the service; reloaded when it changes. Unset: plain text.",
    )
    tls_key: OptionalFile = Field(default=None, description="PEM file with the private key of the certificate.")
    tls_client_ca: OptionalFile = Field(
        default=None,
        description="PEM file of authorities. Only clients with a certificate of one of them can connect (mutual TLS). "
        "Unset: clients need no certificate.",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self


class SecuritySettings(TlsSettings):
    """Identity of the callers of both services."""

    auth_tokens: OptionalFile = Field(
        default=None,
        description="File of bearer tokens and their roles, as `neap tokens create` writes it; reloaded when it "
        "changes. Unset: anybody may call every method.",
    )
    allow_plaintext_tokens: bool = Field(
        default=False,
        description="Accept tokens without TLS beyond loopback, because something else encrypts the connection.",
    )


class ClientSettings(BaseSettings):
    """Connections of clients: the `neap` commands."""

    model_config = SettingsConfigDict(env_prefix="NEAP_CLIENT_", frozen=True, populate_by_name=True)

    tls: bool = Field(default=False, description="Encrypt with TLS and trust the authorities that this machine trusts.")
    ca: OptionalFile = Field(
        default=None,
        description="PEM file of the authorities to trust. Implies TLS. Unset: those that this machine trusts.",
    )
    cert: OptionalFile = Field(
        default=None,
        description="PEM file of the client's certificate, for mutual TLS. Implies TLS. Unset: the client shows no "
        "certificate.",
    )
    key: OptionalFile = Field(default=None, description="PEM file with the private key of the client's certificate.")
    server_name: str = Field(
        default="",
        description="Name that the server's certificate must be valid for, if it is not the address that is called "
        "(for example through a port-forward). Unset: the address.",
    )
    token: SecretStr = Field(
        default=SecretStr(""),
        validation_alias="NEAP_TOKEN",
        description="Bearer token to call with. Unset: no token is sent.",
    )
    token_file: OptionalFile = Field(
        default=None,
        validation_alias="NEAP_TOKEN_FILE",
        description="File with the bearer token, read again for every call. Cannot be combined with the token itself. "
        "Unset: no token is sent.",
    )
    allow_plaintext_tokens: bool = Field(
        default=False,
        validation_alias="NEAP_ALLOW_PLAINTEXT_TOKENS",
        description="Send the token without TLS beyond loopback, because something else encrypts the connection.",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key must be given together")
        if self.token.get_secret_value() and self.token_file is not None:
            raise ValueError("token and token_file cannot be combined")
        return self

    def client_security(self) -> ClientSecurity:
        """What a client needs of it."""
        return ClientSecurity(
            tls=self.tls,
            ca=self.ca,
            certificate=self.cert,
            key=self.key,
            server_name=self.server_name,
            token=self.token.get_secret_value().strip(),
            token_file=self.token_file,
            allow_plaintext_token=self.allow_plaintext_tokens,
        )
