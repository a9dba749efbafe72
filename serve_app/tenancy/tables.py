"""The tables of the store, as the newest migration leaves them. Times are seconds since 1970."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

METADATA = MetaData()

TENANTS = Table(
    "tenants",
    METADATA,
    Column("name", String(128), primary_key=True),
    Column("created_s", Double, nullable=False),
)

KEYS = Table(
    "keys",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column("alias", String(128), unique=True),
    Column("tenant", String(128), ForeignKey("tenants.name"), nullable=False),
    Column("models", JSON, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("requests_per_minute", BigInteger),
    Column("tokens_per_minute", BigInteger),
    Column("max_parallel_requests", BigInteger),
    Column("tokens_per_day", BigInteger),
    Column("tokens_per_month", BigInteger),
    Column("max_tokens", BigInteger),
    Column("lowest_priority", BigInteger),
    Column("metadata", JSON, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double),
    Column("revoked_s", Double),  # the row stays: usage and the audit log refer to it
    Column("digest", LargeBinary(32), nullable=False),
    Column("previous_digest", LargeBinary(32)),  # of the secret before the last rotation
    Column("previous_until_s", Double),
)

# Append-only: no code changes or removes a row.
AUDIT = Table(
    "audit",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at_s", Double, nullable=False, index=True),
    Column("actor", String(256), nullable=False),  # a key's id, "admin-token" or "jwt:<subject>"
    Column("action", String(128), nullable=False),
    Column("subject", Text, nullable=False),
    Column("before", JSON),
    Column("after", JSON),
)

# One row, increased by each change of a key: a manager reads the keys again if it moved, so that
# several managers on one database follow each other.
REVISION = Table(
    "key_revision",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("pepper_check", LargeBinary(32)),  # a hash of the pepper that the keys were made with
)

# Sums of the requests that ended in an hour.
USAGE = Table(
    "usage",
    METADATA,
    Column("hour", BigInteger, primary_key=True, autoincrement=False),  # its begin
    Column("key_id", String(256), primary_key=True),
    Column("tenant", String(128), primary_key=True),
    Column("model", String(512), primary_key=True),  # name@version, of the adapter or the base
    Column("arm", String(16), primary_key=True),
    Column("base", String(512), nullable=False),
    Column("rank", Integer, nullable=False),  # of the adapter; 0: the base
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("engine_ms", Double, nullable=False),
)

# The number of the last batch of each ingress process that is in USAGE.
USAGE_BATCHES = Table(
    "usage_batches",
    METADATA,
    Column("source", String(128), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("at_s", Double, nullable=False),
)
