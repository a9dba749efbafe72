"""Sums of the use by hour, and the batches that are in them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("key_id", sa.String(256), primary_key=True),
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("model", sa.String(512), primary_key=True),
        sa.Column("arm", sa.String(16), primary_key=True),
        sa.Column("base", sa.String(512), nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("engine_ms", sa.Double, nullable=False),
    )
    op.create_table(
        "usage_batches",
        sa.Column("source", sa.String(128), primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("at_s", sa.Double, nullable=False),
    )


def downgrade() -> None:
    for table in ("usage_batches", "usage"):
        op.drop_table(table)
