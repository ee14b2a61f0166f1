"""What a person sees of a running server, in a terminal. Talks to it over its HTTP API alone, as any client would."""

from __future__ import annotations


class TerminalError(Exception):
    """A command against a running server failed: one line for the person who typed it. Exit code 1."""
