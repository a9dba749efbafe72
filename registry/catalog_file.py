"""The last good catalog on this node's disk, for a server that starts while its registry is down.

A JSON file with the digest of its content and a hash of the registry's URI, replaced whole. A file
that is truncated, changed, of another registry or of another version of loraplex is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from dataclasses import asdict
from pathlib import Path

import msgspec

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, DanglingAlias, Rejected, Setting
from registry.files import sync

logger = logging.getLogger(__name__)

_FORMAT = 1
_MAX_BYTES = 1024**3


class _Parts(msgspec.Struct, forbid_unknown_fields=True):
    bases: tuple[BaseVersion, ...]
    adapters: tuple[AdapterVersion, ...]
    rejected: tuple[Rejected, ...]
    settings: tuple[Setting, ...]
    dangling: tuple[DanglingAlias, ...] = ()


class CatalogFile:
    def __init__(self, path: Path, tracking_uri: str) -> None:
        self.path = path
        self._registry = hashlib.sha256(tracking_uri.encode()).hexdigest()

    def write(self, catalog: Catalog) -> None:
        """Writes the file; durable when it returns. Raises OSError, which keeps the previous
        file."""
        parts = {
            name: [asdict(one) for one in getattr(catalog, name)]
            for name in _Parts.__struct_fields__
        }
        content = json.dumps(parts)
        head = {
            "format": _FORMAT,
            "registry": self._registry,
            "sha256": hashlib.sha256(content.encode()).hexdigest(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with open(os.open(fresh, flags, 0o600), "w") as file:
                file.write(f"{json.dumps(head)}\n{content}\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(self.path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        sync(self.path.parent)

    def read(self) -> Catalog | None:
        """Returns None if there is no file, or if it cannot be used: the log has the reason."""
        try:
            return self._read()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            # msgspec.ValidationError is a ValueError.
            logger.error("the stored catalog %s is not used: %s", self.path, error)
            return None

    def _read(self) -> Catalog:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(self.path, flags), "rb") as file:
            if os.fstat(file.fileno()).st_size > _MAX_BYTES:
                raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
            first, _, rest = file.read().partition(b"\n")
        head = json.loads(first)
        content = rest.removesuffix(b"\n")
        if not isinstance(head, dict) or head.get("format") != _FORMAT:
            raise ValueError("it is of another format")
        if head.get("registry") != self._registry:
            raise ValueError("it is of another registry")
        if head.get("sha256") != hashlib.sha256(content).hexdigest():
            raise ValueError("its digest is not that of its content")
        parts = msgspec.convert(json.loads(content), _Parts)
        return Catalog(**msgspec.structs.asdict(parts))
