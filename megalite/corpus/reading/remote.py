"""Files behind a URL (`s3://`, `gs://`, `https://`, `memory://` ...), by fsspec. The one file that imports it.

    URL --list_remote--> files with sizes and versions       one listing, when a station is planned
    URL --open_remote--> a stream of bytes that can seek     by each task, which fetches only the ranges it reads

Nothing is copied to the disk first. Each service has its own package behind fsspec (s3fs, gcsfs, aiohttp ...), which
takes the credentials from where it always does: the environment, or the profile of the service's own tools.

A file that a service does not deliver is not a damaged file. So whatever goes wrong on the way is an UnavailableError,
which stops the station but keeps what is done; only content that arrives and is bad goes to the rejects.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from megalite.corpus.source import WEB, file_name
from megalite.errors import DataError, UnavailableError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

READ_AHEAD_BYTES = 1 << 20

COPY_BYTES = 1 << 22

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hf": "huggingface_hub",
}
"""What to install for a protocol."""

VERSION_KEYS = (
    *("ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "Digest"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)
"""What services call that which changes with a file: first what follows its content, then times."""


class FoundFile(NamedTuple):
    """A file of a source, here or behind a URL."""

    path: str
    """Absolute, or a URL."""
    id: str
    """What it is called in ids."""
    num_bytes: int
    """As it lies there, perhaps compressed; 0 where a web server does not say."""
    version: str
    """Another one whenever the contents may be others."""


def list_remote(url: str) -> list[FoundFile]:
    """Every file at or below a URL, sorted by name; hidden ones are left out. A web address is one file.

    Raises:
        DataError: nothing is there, or access is refused.
        UnavailableError: the package for this protocol is missing, or the service does not answer.
    """
    filesystem, path = _filesystem(url)
    try:
        filesystem.invalidate_cache()
        root = filesystem.info(path)
        if root["type"] != "directory":
            return [_found(url, PurePosixPath(file_name(url)).name, root)]
        found = _files_below(filesystem, path)
    except FileNotFoundError as error:
        if url.startswith(WEB):
            _tell_answer(url, error)
        why = f" ({_said(error.__cause__)})" if error.__cause__ else ""  # a web server that cannot be reached, too
        raise DataError(f"{url}: no such file or folder{why}; look at it with the tools of this service") from error
    except PermissionError as error:
        raise DataError(f"{url}: access is refused ({error}); set the credentials of this service") from error
    except Exception as error:  # each service has its own
        raise UnavailableError(f"{url}: cannot be listed ({_said(error)}); try again, or copy it here") from error
    files = []
    for name in sorted(found):
        inner = PurePosixPath(name).relative_to(path)
        if not any(part.startswith(".") for part in inner.parts):
            files.append(_found(f"{url.rstrip('/')}/{inner}", str(inner), found[name]))
    return files


def _tell_answer(url: str, error: FileNotFoundError) -> None:
    """Raise another error where a web server, or none, has said something else than that a file is not there."""
    answer = error.__cause__
    status = getattr(answer, "status", None)
    if status in (401, 403):
        raise DataError(f"{url}: access is refused ({_said(answer or error)}); set the credentials of this service")
    if answer is not None and status not in (404, 410):
        raise UnavailableError(f"{url}: cannot be listed ({_said(answer)}); try again, or copy it here") from error


def _files_below(filesystem: AbstractFileSystem, path: str) -> dict[str, dict[str, Any]]:
    """Every file below a folder by its name; hidden folders are left out. `find`, where it is fsspec's own, leaves out
    what it cannot list, so it is asked only of services that answer with all of a folder at once."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    find = getattr(type(filesystem), "_find", type(filesystem).find)
    if find not in (AbstractFileSystem.find, AsyncFileSystem._find):
        return filesystem.find(path, detail=True)
    found, folders = {}, [path]
    for folder in folders:  # gets longer on the way
        for info in filesystem.ls(folder, detail=True):
            name = info["name"].rstrip("/")
            if info["type"] != "directory":
                found[name] = info
            elif name != folder.rstrip("/") and not PurePosixPath(name).name.startswith("."):
                folders.append(name)
    return found


def open_remote(url: str, *, in_ranges: bool = False) -> BinaryIO:
    """A file behind a URL as a stream of its bytes.

    Args:
        url: the file.
        in_ranges: fetch what is asked for and no more (Parquet); else read ahead, for reading from front to back. From
            a web server that sends whole files only, the file is copied first.

    Raises:
        UnavailableError: it cannot be opened, or, while it is read, the service stops delivering.
    """
    filesystem, path = _filesystem(url)
    try:
        whole_only = url.startswith(WEB) and not _sends_ranges(filesystem, path)
        options = {"block_size": 0} if whole_only else {"cache_type": "none" if in_ranges else "readahead"}
        file = filesystem.open(path, "rb", **options)
    except Exception as error:
        raise _broken_off(url, error) from error
    guarded = _Guarded(file, url, can_seek=file.seekable() and not whole_only)
    if not in_ranges:
        return io.BufferedReader(guarded, READ_AHEAD_BYTES)
    return io.BufferedReader(guarded) if guarded.seekable() else _copied(guarded)


def _sends_ranges(filesystem: AbstractFileSystem, path: str) -> bool:
    """Whether a web server does, found by asking for one byte: few say so, and fsspec takes all for ones that do."""
    with filesystem.open(path, "rb", cache_type="none") as file:
        try:
            file.seek(1)
            file.read(1)
        except ValueError:
            return False
    return True


def _copied(file: io.RawIOBase) -> BinaryIO:
    """The same content in a file without a name, which goes away when it is closed."""
    copy = TemporaryFile()  # noqa: SIM115  (closed by who reads it)
    with file:
        shutil.copyfileobj(file, copy, COPY_BYTES)
    copy.seek(0)
    return copy


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """A file behind a URL on this machine's disk while the block lasts, for readers that need a path."""
    with TemporaryDirectory() as folder:
        path = Path(folder, PurePosixPath(file_name(url)).name)
        with open_remote(url) as file, open(path, "wb") as copy:
            shutil.copyfileobj(file, copy, COPY_BYTES)
        yield path


class _Guarded(io.RawIOBase):
    """A file of fsspec whose failures are UnavailableErrors, so that none of them passes for a damaged file."""

    def __init__(self, file: BinaryIO, url: str, *, can_seek: bool):
        self._file = file
        self._url = url
        self._can_seek = can_seek

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._can_seek

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._file.read(len(buffer))
        except Exception as error:
            raise _broken_off(self._url, error) from error
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            return self._file.seek(offset, whence)
        except Exception as error:
            raise _broken_off(self._url, error) from error

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and the path in it."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = PACKAGES.get(protocol)
        advice = f"pip install {package}" if package else str(error)
        raise UnavailableError(f"{url}: {protocol}:// needs a package that is not here: {advice}") from error
    except ValueError as error:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise DataError(f"{url}: no such kind of address ({error}); there are {known} and others of fsspec") from error


def spelt_out(name: str) -> str:
    """A file's name as an id can have it: bytes that are no UTF-8 as \\xe9."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _found(url: str, id: str, info: dict[str, Any]) -> FoundFile:
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    return FoundFile(url, id, info.get("size") or 0, version)


def _broken_off(url: str, error: Exception) -> UnavailableError:
    return UnavailableError(f"{url}: cannot be read ({_said(error)}); run the same command again: what is done is kept")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
