"""The model cache on disk: where things lie, one lock a thing, and writes that are either whole or not there.

    $XDG_CACHE_HOME/tidegate/          (default ~/.cache/tidegate)
      models/NAME/FILE.gguf            fetched catalog models, verified before they get this name
      ir/DIGEST-VERSION/               converted models, keyed by the digest of the GGUF
      digests/KEY.json                 digests of files elsewhere, valid while size and modification time stay
      locks/KEY.lock                   flock: the kernel drops it when its holder dies, however it dies
      work/KEY.XXXX/                   work in progress; removed by the next holder of the same lock

Invariant: nothing under models/ or ir/ is ever half written; a thing appears by one rename, under its lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tidegate.models.errors import ModelError

_CHUNK_BYTES = 1 << 20


def cache_dir() -> Path:
    """The cache folder, by the XDG rules (a relative $XDG_CACHE_HOME is ignored). It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "tidegate"


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an OSError of the cache folder into a ModelError that says what to do."""
    try:
        yield
    except OSError as error:
        where = cache_dir()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"{what}: no space left in {where}; free some, or set XDG_CACHE_HOME elsewhere") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ModelError(
                f"{what}: cannot write to {where} ({error.strerror}); set XDG_CACHE_HOME to another folder"
            ) from None
        raise ModelError(f"{what}: {error}") from None


@contextlib.contextmanager
def locked(key: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of `key`, among all processes of the user. `on_wait` is called if someone else has it."""
    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    # The lock file stays: removing it would let two processes lock two files of one name.
    with open(folder / f"{key}.lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def work_dir(key: str) -> Iterator[Path]:
    """A fresh folder in the cache, for the holder of `key`'s lock. Leftovers of dead holders are removed."""
    parent = cache_dir() / "work"
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(f"{key}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def need_space(num_bytes: int, what: str) -> None:
    """Raises ModelError when the cache's file system has less room than that."""
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"{what} needs {num_bytes / 1e6:.0f} MB in {folder}, which has {free / 1e6:.0f} MB left; "
            "free some, or set XDG_CACHE_HOME elsewhere"
        )


def publish(source: Path, target: Path) -> None:
    """Give a finished file or folder its final name, durably, in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
        _sync(path)
    if target.is_dir() and source.is_dir():
        # A folder cannot replace a full one. This one was found unusable, and readers hold their files open.
        shutil.rmtree(target)
    os.replace(source, target)
    _sync(target.parent)


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Hex digest of a file's content. `on_bytes` is told how much has been read so far."""
    digest = hashlib.sha256()
    done = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if on_bytes is not None:
                on_bytes(done)
    return digest.hexdigest()


def known_sha256(path: Path) -> str | None:
    """The file's remembered digest, if its size and modification time are still those that were hashed."""
    record, stamp = _digest_record(path)
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        return str(known["sha256"]) if known["stamp"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Not readable is as good as not known: the file itself decides.


def remembered_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """sha256_file, but read again only when the file has changed since."""
    known = known_sha256(path)
    if known is not None:
        return known
    record, stamp = _digest_record(path)  # Of the file as it is before it is read.
    digest = sha256_file(path, on_bytes)
    write_json(record, {"stamp": stamp, "sha256": digest})
    return digest


def write_json(path: Path, content: object) -> None:
    """Write a small file so that readers see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _digest_record(path: Path) -> tuple[Path, dict[str, object]]:
    """Where the digest of this file is remembered, and what must be unchanged for it to hold."""
    real = path.resolve()
    stat = real.stat()
    key = hashlib.sha256(str(real).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    stamp: dict[str, object] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
    return cache_dir() / "digests" / f"{key}.json", stamp


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
