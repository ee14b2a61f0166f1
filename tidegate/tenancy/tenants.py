"""Who a request comes from: a key, or the name that a trusted proxy gives, to a Tenant.

Owns: the tenants and their keys' hashes. Never: the keys themselves, HTTP, or how much a tenant may use (quota.py).
A key is hashed first, and its hash compared with every hash there is: how long that takes says nothing of which keys
exist. Without tenants in the configuration there is one, without a name, and no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from itertools import repeat

from tidegate.config import TenantConfig

KEY_PREFIX = "sha256:"


@dataclass(frozen=True, slots=True)
class Tenant:
    """`namespace` roots the hashes of its blocks: tenants with equal namespaces share their prefix cache."""

    name: str
    config: TenantConfig
    namespace: str = ""


ANONYMOUS = Tenant("", TenantConfig())
"""The one tenant of a server that is configured without any."""


class TenantRegistry:
    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        self._by_name = {name: Tenant(name, config, _namespace(name, config)) for name, config in tenants.items()}
        self._owners = [tenant for tenant in self._by_name.values() for _ in tenant.config.keys]
        self._digests = [_digest_of(key) for tenant in self._by_name.values() for key in tenant.config.keys]

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def anonymous(self) -> Tenant | None:
        """Whose requests are that come without a key: nobody's, where there are tenants."""
        return None if self._by_name else ANONYMOUS

    def by_key(self, key: bytes) -> Tenant | None:
        """The tenant whose key this is. All hashes are compared, whichever it is."""
        digest = sha256(key).digest()
        matches = list(map(compare_digest, self._digests, repeat(digest)))
        place = sum(index for index, is_equal in enumerate(matches) if is_equal)
        return self._owners[place] if any(matches) else None

    def by_name(self, name: str) -> Tenant | None:
        return self._by_name.get(name)


def key_hash(key: str) -> str:
    """A key as the configuration has it."""
    return KEY_PREFIX + sha256(key.encode()).hexdigest()


def _digest_of(key: str) -> bytes:
    return bytes.fromhex(key.removeprefix(KEY_PREFIX))


def _namespace(name: str, config: TenantConfig) -> str:
    """Groups and tenants have names of their own kind, so that no tenant's name is another's group."""
    return f"tenant:{name}" if config.cache_group is None else f"group:{config.cache_group}"
