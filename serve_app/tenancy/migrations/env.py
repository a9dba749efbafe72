"""Alembic's environment: runs migrations on the connection that the store passes in."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from serve_app.tenancy.tables import METADATA

# MLflow, which may share the database, owns alembic's own name.
VERSION_TABLE = "loraplex_version"


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=METADATA,
        version_table=VERSION_TABLE,
        render_as_batch=connection.dialect.name == "sqlite",  # which cannot alter most columns
    )
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
