"""Tenants in a real `tidegate serve` on the sim executor: keys, tiers, quotas, isolation, usage, reloads."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx

from tests.http.test_admission_served import Serve, cache, model, serve  # noqa: F401
from tidegate.tenancy.tenants import key_hash
from tidegate.usage.store import read_usage

TOML = f"""
[server]
admin_key = "the operator's"
[tenants.acme]
keys = ["{key_hash("key-acme")}"]
tiers = ["default", "flex"]
requests_per_minute = 600
tokens_per_minute = 6000
max_output_tokens = 5
[tenants.busy]
keys = ["{key_hash("key-busy")}"]
requests_per_minute = 1
tier_tokens_per_minute = {{ priority = 0 }}
"""


def complete(url: str, key: str | None = "key-acme", **fields: Any) -> httpx.Response:
    body = {"model": "default", "prompt": "hello " * 90, "max_tokens": 3, "ignore_eos": True, **fields}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=20.0)


def cached(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_who_may_what_and_how_much(serve: Serve, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "usage.db"
    server = serve(TOML, "--usage-file", str(file))
    url = server.wait_ready()
    assert [complete(url, key).status_code for key in (None, "wrong", "key-acme")] == [401, 401, 200]
    forbidden = complete(url, service_tier="priority")
    assert forbidden.status_code == 403
    assert "allowed: default, flex" in forbidden.json()["error"]["message"]

    clamped = complete(url, max_tokens=9)
    assert clamped.json()["usage"]["completion_tokens"] == 5
    assert "changes=clamp:5" in clamped.headers["x-tidegate-admission"]
    assert clamped.headers["x-ratelimit-limit-requests"] == "600"
    assert int(clamped.headers["x-ratelimit-remaining-tokens"]) < 6000
    assert cached(clamped) > 0, "its own prompt is a hit"

    other = complete(url, "key-busy", service_tier="priority")
    assert cached(other) == 0, "another tenant's prompt is not"
    assert other.json()["service_tier"] == "default"
    assert "changes=tier:default" in other.headers["x-tidegate-admission"]
    refused = complete(url, "key-busy")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "requests_per_minute")
    assert 50 <= int(refused.headers["retry-after"]) <= 60

    def timeline(response: httpx.Response, key: str) -> int:
        request_id = response.headers["x-request-id"]
        return httpx.get(f"{url}/debug/requests/{request_id}", headers={"authorization": f"Bearer {key}"}).status_code

    assert [timeline(clamped, key) for key in ("key-acme", "key-busy", "wrong")] == [200, 404, 401]
    assert "acme" not in httpx.get(f"{url}/metrics").text
    own = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer the operator's"}).text
    assert 'tidegate_tenant_usage_total{measure="requests:length",tenant="busy",tier="default"} 1.0' in own

    server.process.terminate()
    assert server.wait() == 0
    usage = {key[1:]: amount for key, amount in read_usage(file, 0).items()}
    assert usage["busy", "default", "requests:length"] == 1
    assert usage["busy", "default", "output_tokens"] == 3
    assert usage["busy", "default", "refusals:requests_per_minute"] == 1
    assert usage["acme", "default", "output_tokens"] == 8


def test_a_proxy_that_is_trusted_names_the_tenant(serve: Serve) -> None:  # noqa: F811
    proxied = TOML.replace("[server]", '[server]\ntenant_header = "x-tenant-id"\ntrusted_proxies = ["{}"]')
    for network, status in (("127.0.0.0/8", 200), ("10.0.0.0/8", 401)):
        url = serve(proxied.replace("{}", network)).wait_ready()
        body = {"prompt": "hi", "max_tokens": 1}
        response = httpx.post(f"{url}/v1/completions", json=body, headers={"x-tenant-id": "acme"}, timeout=20.0)
        assert response.status_code == status


def test_keys_and_limits_are_read_again_all_or_nothing(serve: Serve, tmp_path: Path) -> None:  # noqa: F811
    server = serve(TOML)
    url = server.wait_ready()
    (tmp_path / "config.toml").write_text(TOML.replace("weight", "wait") + "\nweight = -1\n")
    server.process.send_signal(signal.SIGHUP)
    server.until(lambda: "the configuration stays as it is" in server.err)
    assert complete(url).status_code == 200
    (tmp_path / "config.toml").write_text(TOML.replace(key_hash("key-acme"), key_hash("key-new")))
    server.process.send_signal(signal.SIGHUP)
    server.until(lambda: "configuration read again; changed: tenants" in server.err)
    assert [complete(url, key).status_code for key in ("key-acme", "key-new")] == [401, 200]
