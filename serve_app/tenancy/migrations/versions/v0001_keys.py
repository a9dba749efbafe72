"""Creates the tables of tenants, keys, the audit log and the keys' revision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_LIMITS = (
    *("requests_per_minute", "tokens_per_minute", "max_parallel_requests"),
    *("tokens_per_day", "tokens_per_month", "max_tokens", "lowest_priority"),
)


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("created_s", sa.Double, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("alias", sa.String(128), unique=True),
        sa.Column("tenant", sa.String(128), sa.ForeignKey("tenants.name"), nullable=False),
        sa.Column("models", sa.JSON, nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        *(sa.Column(name, sa.BigInteger) for name in _LIMITS),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double),
        sa.Column("revoked_s", sa.Double),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("previous_digest", sa.LargeBinary(32)),
        sa.Column("previous_until_s", sa.Double),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at_s", sa.Double, nullable=False, index=True),
        sa.Column("actor", sa.String(256), nullable=False),
        sa.Column("action", sa.String(128), nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
    )
    revision_table = op.create_table(
        "key_revision",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("pepper_check", sa.LargeBinary(32)),
    )
    op.bulk_insert(revision_table, [{"id": 1, "number": 0}])


def downgrade() -> None:
    for table in ("key_revision", "audit", "keys", "tenants"):
        op.drop_table(table)
