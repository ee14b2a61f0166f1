"""Tenants: which key is whose, which prefix caches are shared, and what a configuration may not say."""

from __future__ import annotations

from hmac import compare_digest
from pathlib import Path

import pytest

from tidegate.config import ConfigError, TenantConfig, load_config
from tidegate.tenancy.tenants import ANONYMOUS, TenantRegistry, key_hash


def registry(**keys: str) -> TenantRegistry:
    return TenantRegistry({name: TenantConfig(keys=(key_hash(key),)) for name, key in keys.items()})


def test_a_key_names_its_tenant_and_no_other_does() -> None:
    tenants = registry(a="key-a", b="key-b", c="key-c")
    assert [tenants.by_key(f"key-{name}".encode()).name for name in "abc"] == ["a", "b", "c"]  # type: ignore[union-attr]
    assert tenants.by_key(b"key-d") is None
    assert tenants.by_key(b"") is None
    assert tenants.by_key(key_hash("key-a").encode()) is None


def test_a_tenant_may_have_several_keys() -> None:
    tenants = TenantRegistry({"a": TenantConfig(keys=(key_hash("old"), key_hash("new"))), "b": TenantConfig()})
    assert {tenants.by_key(key).name for key in (b"old", b"new")} == {"a"}  # type: ignore[union-attr]


def test_without_tenants_everyone_is_the_same_one_and_with_them_nobody_is() -> None:
    assert TenantRegistry({}).anonymous is ANONYMOUS
    assert registry(a="key-a").anonymous is None


def test_a_lookup_compares_every_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return compare_digest(a, b)

    monkeypatch.setattr("tidegate.tenancy.tenants.compare_digest", counting)
    tenants = registry(a="key-a", b="key-b", c="key-c")
    for key in (b"key-a", b"key-c", b"unknown"):
        compared.clear()
        tenants.by_key(key)
        assert len(compared) == 3


def test_prefix_caches_are_shared_inside_a_group_only() -> None:
    tenants = TenantRegistry({
        "a": TenantConfig(cache_group="g"), "b": TenantConfig(cache_group="g"), "g": TenantConfig(), "c": TenantConfig()
    })  # fmt: skip
    spaces = {name: tenants.by_name(name).namespace for name in tenants.names}  # type: ignore[union-attr]
    assert spaces["a"] == spaces["b"]
    assert len(set(spaces.values())) == 3


HASH = key_hash("a key")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tenants.a]\nweight = -1", "tenants.a.weight"),
        ("[tenants.a]\nwieght = 2", "did you mean 'weight'"),
        (f'[tenants.a]\nkeys = ["{HASH}"]\n[tenants.b]\nkeys = ["{HASH}"]', "tenants a and b have a key in common"),
        ('[tenants.a]\ntiers = ["gold"]', "names tier 'gold'; known: priority, default, flex"),
        ('[tenants.a]\ntiers = ["flex"]\ndefault_tier = "priority"', "not one of its tiers: flex"),
        ("[tenants.a]\ntier_tokens_per_minute = { gold = 1 }", "names tier 'gold'"),
        ('[tenants."a b"]\nweight = 1', "is no tenant's name"),
        ("[tenants.a]\nmax_kv_share = 1.5", "tenants.a.max_kv_share"),
        ('[server]\ntrusted_proxies = ["here"]', "trusted_proxies"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_key_that_was_not_hashed_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[tenants.a]\nkeys = ["my-secret"]')
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert "my-secret" not in str(caught.value)
    assert "sha256:" in str(caught.value)


def test_a_tier_that_is_not_named_is_one_that_is_allowed() -> None:
    assert TenantConfig().fallback_tier == "default"
    assert TenantConfig(tiers=("flex",)).fallback_tier == "flex"
    assert TenantConfig(tiers=("flex", "default")).fallback_tier == "default"
    assert TenantConfig(default_tier="priority").fallback_tier == "priority"
