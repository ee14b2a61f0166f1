"""Benchmarks: what a machine, an engine and a server do with a known piece of work, as figures.

Owns: workloads (pure, seeded), clients, the reference pipeline, scoring and reports. Never does: change what it
measures; it drives the engine through the loop that serves, and servers through their HTTP API.
"""
