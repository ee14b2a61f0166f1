"""run: the whole life of `tidegate serve`, from a configuration to exit code 0.

    bind the port -> fetch and convert the model -> listen ─┬─ worker process loads ──┬─> served: banner
                                                            └─ tokenizer, template ───┘
    SIGTERM, SIGINT -> drain (server.py) -> end the worker -> 0

Owns: that order, and what the operator reads. A start that fails is one ConfigError, whichever process failed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tidegate.api import server
from tidegate.api.app import Api
from tidegate.api.frontend import Frontend
from tidegate.api.reload import Reloader
from tidegate.api.server import Server
from tidegate.api.service import ServedModel
from tidegate.api.tenancy import Tenancy
from tidegate.clock import RealClock
from tidegate.config import Config
from tidegate.gate.gate import Gate
from tidegate.metrics.registry import CONTENT_TYPE, ServerMetrics
from tidegate.metrics.tenants import render_tenants
from tidegate.models.load import resolve_model
from tidegate.models.source import ModelSource
from tidegate.text.chat_template import ChatTemplate
from tidegate.text.tokenizer import Tokenizer
from tidegate.usage.store import UsageStore
from tidegate.version import __version__
from tidegate.worker.build import load_text
from tidegate.worker.messages import WorkerInfo
from tidegate.worker.supervisor import WorkerSupervisor

_SHOWN_LENGTHS = (512, 2048)
_INTERRUPTED_EXIT_CODE = 130


def run(config: Config, reload: Callable[[], Config] | None = None) -> int:
    """Serve until a signal. Returns the exit code. Raises ConfigError when the start fails.

    `reload` reads the configuration anew at SIGHUP; it may raise ConfigError, and everything stays as it is then.
    """
    logging.basicConfig(
        level=config.log.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        listener = server.bind(config.server)
        with listener:
            model = resolve_model(config.model.model)
            return server.run(_serve(config, model, listener, reload))
    except KeyboardInterrupt:  # while the model was fetched; later on a signal drains
        return _INTERRUPTED_EXIT_CODE


async def _serve(
    config: Config, model: ModelSource, listener: socket.socket, reload: Callable[[], Config] | None
) -> int:
    clock = RealClock()
    metrics = ServerMetrics()
    usage = None if config.server.usage_file is None else UsageStore(Path(config.server.usage_file))
    tenancy = Tenancy(config, clock, usage)
    frontend = Frontend(config, Gate(config), metrics, clock, tenancy)
    api = Api(
        frontend,
        config.server,
        clock,
        lambda: (metrics.render(), CONTENT_TYPE),
        tenancy,
        lambda: (metrics.render() + render_tenants(tenancy.totals), CONTENT_TYPE),
    )
    http = Server(api, config.server, listener)
    reloader = None if reload is None else Reloader(config, reload, frontend.reconfigure)
    serving = asyncio.ensure_future(http.serve(on_hangup=reloader))
    frontend.add_worker(WorkerSupervisor("0", model, config, frontend))
    starting = asyncio.ensure_future(_start(config, model, frontend, http))
    try:
        await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        await serving
        return 0
    finally:
        starting.cancel()
        api.is_draining = True  # after a start that failed there is nothing to drain, and nothing to say about it
        http.begin_drain()
        await asyncio.gather(serving, return_exceptions=True)
        await frontend.stop()
        if usage is not None:
            usage.close()


async def _start(config: Config, model: ModelSource, frontend: Frontend, http: Server) -> None:
    """Until requests are served. Raises ConfigError."""
    print(f"loading {model.name} ...", file=sys.stderr, flush=True)
    text = asyncio.get_running_loop().run_in_executor(None, load_text, model)
    info = await frontend.first_worker()
    tokenizer, template = await text
    frontend.metrics.set_info(
        version=__version__,
        model=info.model,
        weights=info.weight_format,
        kv_cache_dtype=info.kv_cache_dtype,
        compute_dtype=info.compute_dtype,
    )
    frontend.model = served = served_model(config, model, info, tokenizer, template)
    # All that is here now stays: collections need not look at it again.
    gc.collect()
    gc.freeze()
    print(banner(config, served, info, http.url), flush=True)


def served_model(
    config: Config, model: ModelSource, info: WorkerInfo, tokenizer: Tokenizer, template: ChatTemplate
) -> ServedModel:
    return ServedModel(
        name=config.model.served_model_name or model.name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=model.stop_token_ids or tokenizer.eos_ids,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        created=int(time.time()),
        details={
            "weights": info.weight_format,
            "kv_cache_dtype": info.kv_cache_dtype,
            "compute_dtype": info.compute_dtype,
        },
    )


def banner(config: Config, served: ServedModel, info: WorkerInfo, url: str) -> str:
    """What is served, how precisely, how much fits, and how to try it."""
    num_tokens = info.num_blocks * info.block_size
    lengths = [*(length for length in _SHOWN_LENGTHS if length < info.max_model_len), info.max_model_len]
    fits = ", ".join(
        f"{info.num_blocks // -(-length // info.block_size):,} requests of {length:,} tokens" for length in lengths
    )
    token_bytes = info.bytes_per_block // info.block_size
    kv_mib = info.num_blocks * info.bytes_per_block / 2**20
    key = " -H 'Authorization: Bearer KEY'" if config.server.api_key or config.tenants else ""
    lines = [
        f"tidegate {__version__} serves {served.name} at {url}",
        f"  precision  weights {info.weight_format}, KV {info.kv_cache_dtype}, compute {info.compute_dtype}",
        f"  KV memory  {kv_mib:,.0f} MiB = {num_tokens:,} tokens of {token_bytes:,} bytes: {fits}",
        f"  limits     {info.max_model_len:,} tokens a request (max_model_len), {info.max_num_seqs} requests at once, "
        f"{info.max_num_batched_tokens} tokens a step",
        f"  try it     curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        """-d '{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}'""",
    ]
    if config.worker.executor == "sim":
        lines.insert(1, "  executor   sim: NOTHING IS COMPUTED, the text is noise; only the timing is like a model's")
    return "\n".join(lines)
