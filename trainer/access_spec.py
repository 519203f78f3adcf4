"""What a job's `servers` section says of TLS and tokens: paths alone, for the resolved job is kept in snapshots.

A path is one on the machines of the driver and of every worker.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from trainer.data.spec import AbsolutePath
from trainer.section import Section


class AccessSection(Section):
    tls: bool = Field(False, description="launch external: TLS with public CAs; other keys of TLS imply it")
    tls_ca: AbsolutePath | None = Field(None, description="PEM: the shards' certificates must be of one of these CAs")
    tls_cert: AbsolutePath | None = Field(None, description="PEM: for shards that ask for a client's certificate")
    tls_key: AbsolutePath | None = Field(None, description="PEM: the key of tls_cert; mode 0600 or 0640")
    tls_server_name: str | None = Field(
        None, min_length=1, max_length=253, description="name in the shards' certificates; default: as in the address"
    )
    token_file: AbsolutePath | None = Field(
        None, description="file of one line, the token of role train; mode 0600 or 0640; read again when it changes"
    )
    insecure: bool = Field(False, description="lets the token leave this machine without TLS")

    @model_validator(mode="after")
    def _check_access(self) -> AccessSection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: a certificate and its key; give both or neither")
        return self

    def access_keys(self) -> list[str]:
        """Names of the keys that say something."""
        return [name for name in AccessSection.model_fields if getattr(self, name)]
