"""HTTP over a bare socket, for what no client library would send."""

from __future__ import annotations

import json
import socket
from typing import Any

from tests.http.fake_service import WAIT_S, RunningServer


def connect(server: RunningServer, *, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(WAIT_S)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(("127.0.0.1", server.port))
    return sock


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1", "host: t", "content-type: application/json", f"content-length: {len(body)}", *headers
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chat(**fields: Any) -> bytes:
    """A whole chat request."""
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return post("/v1/chat/completions", json.dumps(body).encode())


def read_all(sock: socket.socket) -> bytes:
    """What the server sends until it closes; a reset counts as a close."""
    data = b""
    while True:
        try:
            chunk = sock.recv(65536)
        except ConnectionResetError:
            return data
        if not chunk:
            return data
        data += chunk


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        chunk = sock.recv(65536)
        assert chunk, f"closed before {mark!r}: {data[-500:]!r}"
        data += chunk
    return data


def read_response(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One response that has a content-length."""
    data = read_until(sock, b"\r\n\r\n")
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    while len(body) < int(headers["content-length"]):
        chunk = sock.recv(65536)
        assert chunk, "closed within the body"
        body += chunk
    return int(status.split()[1]), headers, body
