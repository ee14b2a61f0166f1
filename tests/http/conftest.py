"""One server for the tests that need no limits of their own, with a fresh fake service each."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.http.fake_service import FakeService, RunningServer, serving


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    shared_server.service.reset()
    return shared_server


@pytest.fixture
def service(server: RunningServer) -> FakeService:
    return server.service


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as one:
        yield one


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as one:
        yield one
