"""The tables of the store, as the newest migration leaves them. Times are seconds since 1970."""

from __future__ import annotations

from dataclasses import fields

import sqlalchemy as sa

from serve_app.tenancy.caller import KeyPolicy

METADATA = sa.MetaData()

# The numbers of a key's policy: each has a column.
LIMITS = tuple(
    one.name for one in fields(KeyPolicy) if one.name not in ("tenant", "models", "scopes")
)

TENANTS = sa.Table(
    "tenants",
    METADATA,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("created_s", sa.Double, nullable=False),
)

KEYS = sa.Table(
    "keys",
    METADATA,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("alias", sa.String(128), unique=True),
    sa.Column("tenant", sa.String(128), sa.ForeignKey("tenants.name"), nullable=False),
    sa.Column("models", sa.JSON, nullable=False),
    sa.Column("scopes", sa.JSON, nullable=False),
    *(sa.Column(name, sa.BigInteger) for name in LIMITS),
    sa.Column("metadata", sa.JSON, nullable=False),
    sa.Column("created_s", sa.Double, nullable=False),
    sa.Column("expires_s", sa.Double),
    sa.Column("revoked_s", sa.Double),  # the row stays: usage and the audit log refer to it
    sa.Column("digest", sa.LargeBinary(32), nullable=False),
    sa.Column("previous_digest", sa.LargeBinary(32)),  # of the secret before the last rotation
    sa.Column("previous_until_s", sa.Double),
)

# Append-only: no code changes or removes a row.
AUDIT = sa.Table(
    "audit",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at_s", sa.Double, nullable=False, index=True),
    # a key's id, "admin-token" or "jwt:<subject>"
    sa.Column("actor", sa.String(256), nullable=False),
    sa.Column("action", sa.String(128), nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("before", sa.JSON),
    sa.Column("after", sa.JSON),
)

# One row, increased by each change of a key: a manager reads the keys again if it moved, so that
# several managers on one database follow each other.
REVISION = sa.Table(
    "key_revision",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("pepper_check", sa.LargeBinary(32)),  # a hash of the pepper of the keys
)

# Sums of the requests that ended in an hour.
USAGE = sa.Table(
    "usage",
    METADATA,
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),  # its begin
    sa.Column("key_id", sa.String(256), primary_key=True),
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("model", sa.String(512), primary_key=True),  # name@version of adapter or base
    sa.Column("arm", sa.String(16), primary_key=True),
    sa.Column("base", sa.String(512), nullable=False),
    sa.Column("rank", sa.Integer, nullable=False),  # of the adapter; 0: the base
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("output_tokens", sa.BigInteger, nullable=False),
    sa.Column("engine_ms", sa.Double, nullable=False),
)

# The number of the last batch of each ingress process that is in USAGE.
USAGE_BATCHES = sa.Table(
    "usage_batches",
    METADATA,
    sa.Column("source", sa.String(128), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
)
