"""Tenancy: who sends a request, what of its quota it takes, and what is told and kept of its usage.

Owns: the tenants, their quotas, and the way to the usage file. Never: keys in logs or answers, or a word about one
tenant to another. Reconfigured all at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

import msgspec

from tidegate.api.errors import Outcome, Refused
from tidegate.clock import Clock
from tidegate.config import Config
from tidegate.request import Request
from tidegate.tenancy.limits import window_start
from tidegate.tenancy.quota import Exceeded, TenantQuota
from tidegate.tenancy.tenants import ANONYMOUS, Tenant, TenantRegistry
from tidegate.usage.store import UsageStore

Header = tuple[bytes, bytes]


class Tenancy:
    def __init__(self, config: Config, clock: Clock, usage: UsageStore | None = None) -> None:
        self._clock = clock
        self._usage = usage
        self._epoch_s = time.time() - clock.now()
        self._quotas: dict[str, TenantQuota] = {}
        self.totals: Counter[tuple[str, str, str]] = Counter()
        """(tenant, tier, measure) since the start, for the operator's metrics."""
        header = config.server.tenant_header
        self._header = None if header is None else header.lower().encode()
        self._proxies: list[IPv4Network | IPv6Network] = [ip_network(text) for text in config.server.trusted_proxies]
        self._take(config)

    def reconfigure(self, config: Config) -> None:
        """Other tenants, keys and limits for what comes from now on."""
        self._take(config)

    def _take(self, config: Config) -> None:
        self._registry = TenantRegistry(config.tenants)
        now = self._clock.now()
        for name in (*self._registry.names, ""):
            tenant = self._registry.by_name(name) or ANONYMOUS
            quota = self._quotas.get(name)
            if quota is None:
                self._quotas[name] = quota = TenantQuota(tenant.config, now, self._epoch_s)
                self._restore(name, quota, now)
            else:
                quota.reconfigure(tenant.config, now)

    def _restore(self, name: str, quota: TenantQuota, now: float) -> None:
        if self._usage is not None:
            unix_s = self._epoch_s + now
            day, month = (self._usage.tokens_since(name, window_start(what, unix_s)) for what in ("day", "month"))
            quota.restore(day, month, now)

    # Who.

    def identify(self, key: bytes | None, headers: dict[bytes, bytes], client: str | None) -> Tenant:
        """Raises Refused."""
        anonymous = self._registry.anonymous
        if anonymous is not None:
            return anonymous
        if self._header is not None and self._header in headers and self._is_trusted(client):
            tenant = self._registry.by_name(headers[self._header].decode("latin-1"))
        else:
            tenant = None if key is None else self._registry.by_key(key)
        if tenant is None:
            raise Refused(Outcome.UNAUTHORIZED, "a valid API key is needed: Authorization: Bearer KEY")
        return tenant

    def _is_trusted(self, client: str | None) -> bool:
        try:
            address = ip_address(client or "")
        except ValueError:
            return False
        return any(address in network for network in self._proxies)

    # How much.

    def refuse_early(self, request: Request) -> None:
        """Raises Refused when a request with at least this prompt would be refused now."""
        exceeded = self._quotas[request.tenant].would_exceed(request.num_prompt_tokens, self._clock.now())
        if exceeded is not None:
            raise self._refused(request, exceeded)

    def admit(self, request: Request) -> tuple[Request, tuple[str, ...]]:
        """The request as its tenant's quota lets it be served, and what that changes. Raises Refused."""
        quota = self._quotas[request.tenant]
        granted = quota.admit(
            request.request_id, request.tier, request.num_prompt_tokens, request.max_tokens, self._clock.now()
        )
        if isinstance(granted, Exceeded):
            raise self._refused(request, granted)
        share = self._config_of(request.tenant).config.max_kv_share
        return msgspec.structs.replace(
            request, tier=granted.tier, max_tokens=granted.max_tokens, max_kv_share=1.0 if share is None else share
        ), granted.changes

    def produced(self, request: Request, tier: str, num_tokens: int, *, num_cached_tokens: int | None) -> None:
        """Tokens of an answer, in the tier it is served in; `num_cached_tokens` of its prompt come with the first."""
        if num_tokens:
            self._quotas[request.tenant].produced(request.request_id, num_tokens, self._clock.now())
            self.count(request.tenant, tier, "output_tokens", num_tokens)
        if num_cached_tokens is not None:
            self.count(request.tenant, tier, "prompt_tokens", request.num_prompt_tokens)
            self.count(request.tenant, tier, "cached_tokens", num_cached_tokens)

    def end(self, request: Request) -> None:
        """The request holds nothing any more. Idempotent."""
        self._quotas[request.tenant].end(request.request_id, self._clock.now())

    def count(self, tenant: str, tier: str, measure: str, amount: int = 1) -> None:
        self.totals[tenant, tier, measure] += amount
        if self._usage is not None:
            self._usage.add(tenant, tier, measure, amount)

    def headers(self, tenant: Tenant) -> Iterator[Header]:
        for name, value in self._quotas[tenant.name].headers(self._clock.now()):
            yield name.encode(), value.encode()

    def _config_of(self, name: str) -> Tenant:
        return self._registry.by_name(name) or ANONYMOUS

    def _refused(self, request: Request, exceeded: Exceeded) -> Refused:
        outcome = Outcome.OVER_QUOTA if exceeded.retry_after_s is None else Outcome(exceeded.limit)
        self.count(request.tenant, request.tier, f"refusals:{outcome}")
        return Refused(outcome, exceeded.message, retry_after_s=exceeded.retry_after_s)
