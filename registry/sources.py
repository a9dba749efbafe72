"""The artifact URIs that may be read: a version's author writes its source, and the credentials of
this process read it.

By default these are the tracking server's own: the artifacts that it proxies, its host, files below
the registry's artifact root, and the scheme and bucket of its default artifact root; with an SQLite
registry every file of this machine. The operator lists all others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from registry.errors import ArtifactError

_LISTED = re.compile(r"[a-z][a-z0-9+.-]{0,30}(://[^/\s]+)?", re.ASCII)
_SHOWN_CHARS = 200


def check_listed(entry: str) -> str:
    """Returns an entry of the operator's list, `s3` or `s3://bucket`. Raises ValueError."""
    if not _LISTED.fullmatch(entry):
        raise ValueError(
            f"{entry[:100]!r} is not a scheme, and not a scheme://bucket such as s3://models"
        )
    return entry


class ArtifactSources:
    def __init__(
        self,
        tracking_uri: str,
        artifact_root: Path | None,
        listed: Sequence[str],
        default_root: Callable[[], str | None],
    ) -> None:
        """`default_root`: returns the server's root; called if no other rule allows a source."""
        self._tracking = urlsplit(tracking_uri)
        self._artifact_root = artifact_root
        self._listed = frozenset(check_listed(entry) for entry in listed)
        self._default_root = default_root

    def check(self, uri: str) -> None:
        """Raises ArtifactError for a URI that must not be read."""
        try:
            parts = urlsplit(uri)
            is_allowed = self._is_allowed(parts)
        except ValueError as error:
            raise ArtifactError(
                f"its source {uri[:_SHOWN_CHARS]!a} is not a URI: {error}"
            ) from None
        if not is_allowed:
            raise ArtifactError(
                f"its source {uri[:_SHOWN_CHARS]!a} is not read here: it is not of the "
                f"tracking server, and registry.artifact_schemes does not list {_place(parts)}"
            )

    def _is_allowed(self, parts: SplitResult) -> bool:
        scheme = parts.scheme or "file"
        if scheme in self._listed or _place(parts) in self._listed:
            return True
        if scheme == "file" and self._tracking.scheme == "sqlite":
            return parts.netloc in ("", "localhost")  # its writers are users of this machine
        is_remote = self._tracking.scheme in ("http", "https")
        if scheme == "mlflow-artifacts":
            return is_remote and (not parts.netloc or parts.netloc == self._tracking.netloc)
        if scheme in ("http", "https"):
            mine = (self._tracking.scheme, self._tracking.netloc)
            return is_remote and (scheme, parts.netloc) == mine
        own = self._artifact_root
        if scheme == "file" and own is not None and _is_below(parts, own):
            return True
        root = self._default_root()
        if root is None:
            return False
        default = urlsplit(root)
        if scheme == "file" and (default.scheme or "file") == "file":
            return _is_below(parts, Path(unquote(default.path)))
        return bool(parts.netloc) and _place(parts) == _place(default)


def _place(parts: SplitResult) -> str:
    """Returns scheme and bucket or host."""
    return f"{parts.scheme or 'file'}://{parts.netloc}" if parts.netloc else parts.scheme or "file"


def _is_below(parts: SplitResult, root: Path) -> bool:
    if parts.netloc not in ("", "localhost"):
        return False
    return Path(unquote(parts.path)).resolve().is_relative_to(root.resolve())
