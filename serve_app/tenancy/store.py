"""The store of keys, tenants and the audit log: SQLite in the home, or PostgreSQL by URL.

Only the manager opens it. Every method blocks and belongs in a thread. No error contains the
database's URL, a statement or a key's hash.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError

from serve_app.errors import ConflictError, ServiceUnavailableError
from serve_app.tenancy.caller import KeyPolicy
from serve_app.tenancy.keys import PepperError
from serve_app.tenancy.orders import Act
from serve_app.tenancy.tables import AUDIT, KEYS, LIMITS, REVISION, TENANTS

logger = logging.getLogger(__name__)

_MIGRATIONS = Path(__file__).parent / "migrations"
_TIMEOUT_S = 5
_UPGRADE_LOCK = 0x6C70780001  # PostgreSQL's advisory lock of two managers that start at once
_RETRY_S = 5
_MOUNTS = Path("/proc/self/mountinfo")
# SQLite's locks and its shared memory do not hold over these; a part of a name behind "fuse.".
_NETWORK_DISKS = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "beegfs"),
        *("gpfs", "glusterfs", "sshfs", "s3fs", "gcsfuse", "rclone", "davfs", "juicefs"),
    )
)

Json = dict[str, Any]


class StoreUnavailableError(ServiceUnavailableError):
    def __init__(self, reason: str) -> None:
        super().__init__("The database of the keys cannot be reached; try again later.", _RETRY_S)
        self.args = (reason,)  # which makes it again in the process of an ingress
        self.reason = reason  # for the log


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A row of the table of keys."""

    id: str
    policy: KeyPolicy
    created_s: float
    digest: bytes = field(repr=False)
    alias: str | None = None
    metadata: Json = field(default_factory=dict)
    expires_s: float | None = None
    revoked_s: float | None = None
    previous_digest: bytes | None = field(default=None, repr=False)
    previous_until_s: float | None = None


class Store:
    def __init__(self, url: str, mounts: Path = _MOUNTS) -> None:
        """`mounts`: the kernel's list of mounts. Raises ValueError if `url` names no database that
        can be used, such as SQLite on a network disk; opens no connection."""
        try:
            parsed = sa.make_url(url)
            self.dialect = parsed.get_backend_name()
            if self.dialect not in ("sqlite", "postgresql"):
                raise ValueError(f"{self.dialect} is not supported; use sqlite or postgresql")
            if self.dialect == "sqlite" and parsed.database:
                _check_disk(parsed.database, mounts)
            self._engine = _open(parsed)
        except (ArgumentError, ImportError, SQLAlchemyError) as error:
            kind = type(error).__name__
            raise ValueError(f"tenancy.database_url cannot be used: {kind}: {error}") from None

    def upgrade(self, revision: str = "head") -> None:
        """Brings the tables to `revision`, by default the newest. Raises StoreUnavailableError."""
        with self.transaction() as connection:
            if self.dialect == "postgresql":
                lock = sa.text("SELECT pg_advisory_xact_lock(:n)")
                connection.execute(lock, {"n": _UPGRADE_LOCK})
            try:
                command.upgrade(_config(connection), revision)
            except CommandError as error:
                reason = f"its tables are of another release: {error}"
                raise StoreUnavailableError(reason) from error

    def downgrade(self, revision: str) -> None:
        """Takes the tables back to `revision`; `base` removes them."""
        with self.transaction() as connection:
            command.downgrade(_config(connection), revision)

    def key_revision(self) -> int:
        """Returns a number that each change of the keys increases."""
        with self.transaction() as connection:
            return _revision(connection)

    def check_pepper(self, check: bytes) -> None:
        """Stores `check`, a hash of the pepper, at the first call. Raises PepperError if the keys
        were made with another pepper."""
        with self.transaction() as connection:
            found = connection.execute(sa.select(REVISION.c.pepper_check)).scalar_one()
            if found is None:
                connection.execute(sa.update(REVISION).values(pepper_check=check))
            elif found != check:
                raise PepperError(
                    "the keys of this database were made with another pepper; set "
                    "LORAPLEX_KEY_PEPPER, or bring the file key_pepper of the former home here"
                )

    def read_keys(self) -> tuple[int, tuple[StoredKey, ...]]:
        """Returns the revision and every key, revoked keys included."""
        with self.transaction() as connection:
            number = _revision(connection)
            rows = connection.execute(sa.select(KEYS).order_by(KEYS.c.created_s)).mappings()
            return number, tuple(_key(row) for row in rows)

    def write_keys(self, changes: Sequence[tuple[StoredKey, Act]], *, is_new: bool = False) -> int:
        """Stores new keys, or replaces the rows of keys, of all or of none, with their tenants and
        the acts. Returns the revision after it. Raises ConflictError if an alias is in use."""
        with self.transaction() as connection:
            # First: its row lock puts the changes of several managers in an order.
            connection.execute(sa.update(REVISION).values(number=REVISION.c.number + 1))
            for name in sorted({key.policy.tenant for key, _ in changes}):
                tenant = sa.select(TENANTS.c.name).where(TENANTS.c.name == name)
                if connection.execute(tenant).first() is None:
                    connection.execute(sa.insert(TENANTS).values(name=name, created_s=time.time()))
            for key, act in changes:
                change = sa.insert(KEYS) if is_new else sa.update(KEYS).where(KEYS.c.id == key.id)
                connection.execute(change.values(_row(key)))
                _note(connection, act)
            return _revision(connection)

    def note(self, act: Act) -> None:
        """Adds an act to the audit log."""
        with self.transaction() as connection:
            _note(connection, act)

    def acts(self, limit: int, before_id: int | None = None) -> list[Json]:
        """Returns entries of the audit log, the latest first, older than `before_id` if given."""
        query = sa.select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
        if before_id is not None:
            query = query.where(AUDIT.c.id < before_id)
        with self.transaction() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Runs a transaction. Raises StoreUnavailableError if the database fails it."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except IntegrityError as error:
            raise ConflictError("key_alias: another key has this alias already") from error
        except SQLAlchemyError as error:
            original = getattr(error, "orig", None) or error
            reason = f"{type(original).__name__}: {str(original).splitlines()[0][:300]}"
            raise StoreUnavailableError(reason) from error


def _open(url: sa.URL) -> sa.Engine:
    is_postgres = url.get_backend_name() == "postgresql"
    limits: Json = {"timeout": _TIMEOUT_S}
    if is_postgres:  # neither libpq nor the server has limits of its own
        limits = {
            "connect_timeout": _TIMEOUT_S,
            "tcp_user_timeout": 2000 * _TIMEOUT_S,
            "options": f"-c statement_timeout={2000 * _TIMEOUT_S}",
        }
    elif url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        if url.database != ":memory:" and not url.database.startswith("file:"):
            # For its owner alone. SQLite gives the files beside it the same mode, and reports a
            # file that cannot be opened when it is used.
            with suppress(OSError):
                os.close(os.open(url.database, os.O_CREAT | os.O_RDWR, 0o600))
    pool: Json = {"pool_size": 2, "max_overflow": 2, "pool_timeout": _TIMEOUT_S}
    engine = sa.create_engine(
        url,
        connect_args={key: value for key, value in limits.items() if key not in url.query},
        pool_pre_ping=is_postgres,
        hide_parameters=True,
        **(pool if is_postgres else {}),
    )
    if not is_postgres:
        sa.event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _check_disk(database: str, mounts: Path) -> None:
    """Raises ValueError if this SQLite file is on a network disk by the list of mounts."""
    if database == ":memory:":
        return
    path = Path(database.removeprefix("file:").partition("?")[0]).resolve()
    try:
        lines = mounts.read_text().splitlines()
    except OSError:  # not Linux
        return
    found, kind = Path("/"), ""
    for line in lines:
        before, _, after = line.partition(" - ")
        # A blank in a name is written as \040.
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split()[4]))
        if path.is_relative_to(point) and len(point.parts) >= len(found.parts):
            found, kind = point, after.split()[0]  # the later of two on one folder hides the other
    if kind.removeprefix("fuse.") in _NETWORK_DISKS:
        raise ValueError(
            f"tenancy.database_url: {path} is on a network disk ({kind} at {found}), where SQLite "
            "loses its locks; use PostgreSQL, or a file on a local disk"
        )


def _set_up_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _config(connection: sa.Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _revision(connection: sa.Connection) -> int:
    number: int = connection.execute(sa.select(REVISION.c.number)).scalar_one()
    return number


def _note(connection: sa.Connection, act: Act) -> None:
    values = {one.name: getattr(act, one.name) for one in fields(Act)}
    connection.execute(sa.insert(AUDIT).values(at_s=time.time(), **values))


def _row(key: StoredKey) -> Json:
    policy = key.policy
    own = {one.name: getattr(key, one.name) for one in fields(StoredKey) if one.name != "policy"}
    return {
        **own,
        **{name: getattr(policy, name) for name in LIMITS},
        "tenant": policy.tenant,
        "models": list(policy.models),
        "scopes": sorted(policy.scopes),
    }


def _key(row: Mapping[Any, Any]) -> StoredKey:
    policy = KeyPolicy(
        row["tenant"],
        tuple(row["models"]),
        frozenset(row["scopes"]),
        **{name: row[name] for name in LIMITS},
    )
    own = (one.name for one in fields(StoredKey) if one.name != "policy")
    return StoredKey(policy=policy, **{name: row[name] for name in own})
