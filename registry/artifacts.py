"""Downloads from an MLflow artifact store, which is not trusted: one file at a time, to the given
path, never through a symlink, never more bytes than allowed.

From a local store and through an MLflow server the limit applies while the bytes come; for other
stores (such as S3, by MLflow's own clients) the size is checked before and after the download.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from requests import Response

from registry.errors import ArtifactError, NotFoundError
from registry.manifest import CHUNK_BYTES, MAX_LISTED, is_plain_path
from registry.mlflow_errors import call

# A server may need this long for a file, and a second more for each so many bytes.
_PATIENCE_S = 60.0
_SLOWEST_BYTES_PER_S = 32 * 1024


def download(repository: ArtifactRepository, path: str, target: Path, *, max_bytes: int) -> None:
    """Downloads a file to exactly `target`, which is removed if the download fails."""
    _check_path(path)
    try:
        call(f"fetching {path}", lambda: _copy(repository, path, target, max_bytes))
    except NotFoundError as error:
        raise ArtifactError(f"{path} is missing in the store") from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def try_link(repository: ArtifactRepository, path: str, target: Path) -> bool:
    """Hardlinks a file out of a local store; returns False if that is impossible."""
    _check_path(path)
    if not isinstance(repository, LocalArtifactRepository):
        return False

    def link() -> bool:
        with _opened_below(repository.artifact_dir, path) as (folder, file):
            try:
                name = path.rpartition("/")[2]
                os.link(name, target, src_dir_fd=folder, follow_symlinks=False)
            except OSError:  # another file system: the file must be copied
                return False
            if not os.path.samestat(os.fstat(file), target.lstat()):
                target.unlink()
                raise ArtifactError(f"{path} changed while it was read")
            return True

    return call(f"linking {path}", link)


def list_files(repository: ArtifactRepository, folder: str) -> dict[str, int]:
    """Returns path below the repository -> size in bytes, of the files directly in the folder."""
    found = call(f"listing {folder!r}", lambda: repository.list_artifacts(folder or None))
    if len(found) > MAX_LISTED:
        raise ArtifactError(f"{folder!r} holds {len(found)} names, at most {MAX_LISTED} are read")
    return {info.path: info.file_size or 0 for info in found if not info.is_dir}


def _check_path(path: str) -> None:
    if not is_plain_path(path):
        raise ArtifactError(f"an artifact has an illegal path: {path[:600]!r}")


def _copy(repository: ArtifactRepository, path: str, target: Path, max_bytes: int) -> None:
    if isinstance(repository, LocalArtifactRepository):
        _copy_local(repository, path, target, max_bytes)
    elif isinstance(repository, HttpArtifactRepository):
        _stream(repository, path, target, max_bytes)
    else:
        _download_with_mlflow(repository, path, target, max_bytes)


def _copy_local(
    repository: LocalArtifactRepository, path: str, target: Path, max_bytes: int
) -> None:
    with _opened_below(repository.artifact_dir, path) as (_, descriptor):
        _check_size(path, os.fstat(descriptor).st_size, max_bytes)
        with open(descriptor, "rb", closefd=False) as file:
            _write(iter(lambda: file.read(CHUNK_BYTES), b""), path, target, max_bytes)


def _stream(repository: HttpArtifactRepository, path: str, target: Path, max_bytes: int) -> None:
    credentials = get_default_host_creds(repository.artifact_uri)  # type: ignore[no-untyped-call]
    response: Response = http_request(  # type: ignore[no-untyped-call]
        credentials, f"/{quote(path)}", "GET", stream=True
    )
    with response:
        if response.status_code == 404:
            raise ArtifactError(f"{path} is missing in the store")
        response.raise_for_status()
        with _cut_if_late(response, path, _PATIENCE_S + max_bytes / _SLOWEST_BYTES_PER_S):
            _write(response.iter_content(CHUNK_BYTES), path, target, max_bytes)


@contextmanager
def _cut_if_late(response: Response, path: str, limit_s: float) -> Iterator[None]:
    """Ends the response after `limit_s`, with a TimeoutError: a server that sends a byte now and
    then exceeds no time-out of the client's, and would hold its reader for ever."""
    is_late = threading.Event()

    def cut() -> None:
        is_late.set()
        with suppress(Exception):  # it has just ended
            response.raw.shutdown()

    timer = threading.Timer(limit_s, cut)
    timer.daemon = True
    timer.start()
    late = TimeoutError(f"{path} was not sent within {limit_s:.0f} s")
    try:
        yield
    except OSError as error:
        if is_late.is_set():
            raise late from error
        raise
    finally:
        timer.cancel()
    if is_late.is_set():  # the end of a response without a length is no error
        raise late


def _download_with_mlflow(
    repository: ArtifactRepository, path: str, target: Path, max_bytes: int
) -> None:
    listed = list_files(repository, path.rpartition("/")[0])
    if path not in listed:
        raise ArtifactError(f"{path} is missing in the store")
    _check_size(path, listed[path], max_bytes)
    folder = target.with_name(target.name + ".download")
    folder.mkdir()
    try:
        got = Path(repository.download_artifacts(path, str(folder)))  # type: ignore[no-untyped-call]
        status = got.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{path} is not a regular file")
        _check_size(path, status.st_size, max_bytes)
        got.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_size(path: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ArtifactError(f"{path} has {size} bytes, at most {max_bytes} are allowed")


def _write(chunks: Iterable[bytes], path: str, target: Path, max_bytes: int) -> None:
    size = 0
    with target.open("wb") as file:
        for chunk in chunks:
            size += len(chunk)
            if size > max_bytes:
                raise ArtifactError(f"{path} sends more than the {max_bytes} bytes allowed")
            file.write(chunk)


@contextmanager
def _opened_below(root: str, path: str) -> Iterator[tuple[int, int]]:
    """Yields descriptors of the last folder and of the file: no part of the path is a symlink, or
    can become a symlink meanwhile."""
    *folders, name = path.split("/")
    descriptors = [os.open(root, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        try:
            for part in folders:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                descriptors.append(os.open(part, flags, dir_fd=descriptors[-1]))
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a writer
            descriptors.append(os.open(name, flags, dir_fd=descriptors[-1]))
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise ArtifactError(f"{path} is missing in the store") from error
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise ArtifactError(f"{path} is a symlink or not a regular file") from error
            raise
        if not stat.S_ISREG(os.fstat(descriptors[-1]).st_mode):
            raise ArtifactError(f"{path} is a symlink or not a regular file")
        yield descriptors[-2], descriptors[-1]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
