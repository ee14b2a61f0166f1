"""ServerClient: the few calls that the terminal commands make to a running server.

Owns: the connection, the address and key, and the one line that says what is wrong (TerminalError). Answers stream as
server-sent events. Never does: retry, or print.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from tidegate.terminal import TerminalError

_CONNECT_TIMEOUT_S = 5.0


class ServerClient:
    """Raises TerminalError from every call when the server is not there, refuses, or breaks off."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL:
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host:
            raise TerminalError(f"{url} is not an address; write it like http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=self.url,
            headers=[] if api_key is None else [(b"authorization", f"Bearer {api_key}".encode())],
            # An answer may take any time to begin: under load the server queues.
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            # A proxy from the environment does not lead to this machine.
            trust_env=parts.host not in ("127.0.0.1", "localhost", "::1"),
        )

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names of the served models."""
        return [str(model["id"]) for model in self._get("/v1/models")["data"]]

    def timeline(self, request_id: str) -> dict[str, Any]:
        document: dict[str, Any] = self._get(f"/debug/requests/{quote(request_id, safe='')}")
        return document

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat completion. Closing the iterator hangs up, which ends the request there."""
        try:
            with self._http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refused(response)
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise TerminalError(f"the answer broke off: {chunk['error'].get('message', chunk['error'])}")
                    yield chunk
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _get(self, path: str) -> Any:
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise self._refused(response)
        try:
            return response.json()
        except ValueError:
            raise TerminalError(f"what answers at {self.url} is not a tidegate server") from None

    def _unreachable(self, error: httpx.HTTPError) -> TerminalError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return TerminalError(f"no server at {self.url}; start one with: tidegate serve")
        return TerminalError(f"the connection to {self.url} broke off ({type(error).__name__})")

    def _refused(self, response: httpx.Response) -> TerminalError:
        """The server's own words, and what to do where that is known."""
        if response.status_code == 401:
            return TerminalError(f"the server at {self.url} asks for a key; give it with --api-key")
        try:
            message = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"status {response.status_code}"
        retry_after = response.headers.get("retry-after")
        return TerminalError(f"the server says: {message}" + (f" (retry in {retry_after} s)" if retry_after else ""))
