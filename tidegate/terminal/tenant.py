"""`tidegate tenant new-key NAME`: a new key for a tenant, printed once; the configuration gets its hash alone.

Owns: the edit of the TOML file, which leaves all the rest of it as it is, comments and order too. The file is replaced
in one go, after what it would say has been read back and accepted.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tomllib
from pathlib import Path

from tidegate.config import ConfigError, load_config
from tidegate.tenancy.tenants import key_hash

_KEYS = re.compile(r"^[ \t]*(?:keys|\"keys\"|'keys')[ \t]*=[ \t]*\[", re.MULTILINE)


def new_key(name: str, file: Path) -> str:
    """Make a key, put its hash into `file` (a new one, or with a table for a new tenant, where needed) and return it.
    Raises ConfigError, and leaves the file as it was."""
    key = f"tg-{secrets.token_urlsafe(32)}"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if file.exists():
        load_config(file)
    _replace(file, with_key(text, name, key_hash(key)))
    return key


def with_key(text: str, name: str, hashed: str) -> str:
    """The TOML text with one key more for the tenant."""
    header = _header_of(text, name)
    if header is None:
        if name in _tenants_of(text):
            raise ConfigError(f"tenant {name} has no table [tenants.{name}] of its own; write its keys there by hand")
        gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        table = name if re.fullmatch(r"[A-Za-z0-9_-]+", name, re.ASCII) else json.dumps(name)
        return f'{text}{gap}[tenants.{table}]\nkeys = ["{hashed}"]\n'
    body_end = _next_table(text, header.end())
    keys = _KEYS.search(text, header.end(), body_end)
    if keys is None:
        return f'{text[: header.end()]}\nkeys = ["{hashed}"]{text[header.end() :]}'
    has_others = bool(_tenants_of(text)[name]["keys"])
    return f'{text[: keys.end()]}"{hashed}"{", " if has_others else ""}{text[keys.end() :]}'


def _header_of(text: str, name: str) -> re.Match[str] | None:
    quoted = re.escape(name)
    return re.search(
        rf"^[ \t]*\[[ \t]*tenants[ \t]*\.[ \t]*(?:{quoted}|\"{quoted}\"|'{quoted}')[ \t]*\][^\n]*", text, re.M
    )


def _next_table(text: str, start: int) -> int:
    following = re.compile(r"^[ \t]*\[", re.MULTILINE).search(text, start)
    return len(text) if following is None else following.start()


def _tenants_of(text: str) -> dict[str, dict[str, list[str]]]:
    tenants = tomllib.loads(text).get("tenants", {})
    return tenants if isinstance(tenants, dict) else {}


def _replace(file: Path, text: str) -> None:
    draft = file.with_name(f".{file.name}.new")
    try:
        draft.write_text(text, encoding="utf-8")
        load_config(draft)
        if file.exists():
            draft.chmod(file.stat().st_mode & 0o777)
        os.replace(draft, file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)
