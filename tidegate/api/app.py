"""The ASGI application: routes, authentication, and one place where every failure becomes an error body.

Owns: the routing table, the API key check, and the thread pool for tokenizing.
Never does: sockets or signals (server.py). Endpoints are plain coroutines over an Exchange; there is no middleware,
so that a streamed token passes through nothing but its own generator.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from tidegate.api.body import parse
from tidegate.api.completions import Job, answer, chat_job, completion_job
from tidegate.api.errors import Outcome, Refused
from tidegate.api.exchange import Exchange
from tidegate.api.prompts import Prompts
from tidegate.api.schemas import DetokenizeBody, TokenizeBody
from tidegate.api.service import Health, Service
from tidegate.api.tenancy import Tenancy
from tidegate.clock import Clock
from tidegate.config import ServerConfig
from tidegate.request import InvalidRequest
from tidegate.version import __version__

logger = logging.getLogger("tidegate.api")

MetricsProvider = Callable[[], tuple[bytes, str]]
"""The body of /metrics and its content type."""

Endpoint = Callable[[Exchange], Awaitable[None]]
JobMaker = Callable[[bytes, Exchange, Prompts, Service], Awaitable[Job]]

_NUM_TOKENIZER_THREADS = 2
_HEALTH_STATUS = {True: 200, False: 503}


class Api:
    """`app` is the ASGI application. While `is_draining`, new requests are refused and those under way go on."""

    def __init__(
        self,
        service: Service,
        config: ServerConfig,
        clock: Clock,
        metrics: MetricsProvider,
        tenancy: Tenancy | None = None,
        admin_metrics: MetricsProvider | None = None,
    ) -> None:
        """`admin_metrics` is what /metrics says to the operator's key. Without `tenancy` there are no tenants."""
        self.is_draining = False
        self._service = service
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._tenancy = tenancy
        self._admin_metrics = admin_metrics
        self._key = None if config.api_key is None else config.api_key.encode()
        self._pool = ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._prompts: Prompts | None = None
        self._running: set[Exchange] = set()
        self._router = Router(routes=self._routes(), redirect_slashes=False)

    def now(self) -> float:
        return self._clock.now()

    @property
    def num_running(self) -> int:
        """Requests that are being answered, from their headers to their last byte."""
        return len(self._running)

    def cut_off(self) -> None:
        """End what still runs: it is told that the server is draining."""
        for exchange in self._running:
            exchange.cut_off()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _routes(self) -> list[Route]:
        chat, completions = self._generate(chat_job), self._generate(completion_job)
        return [
            self._route("POST", "/v1/chat/completions", chat, id_prefix="chatcmpl"),
            self._route("POST", "/v1/completions", completions, id_prefix="cmpl"),
            self._route("GET", "/v1/models", self._list_models),
            self._route("GET", "/v1/models/{model_id:path}", self._get_model),
            self._route("POST", "/tokenize", self._tokenize),
            self._route("POST", "/detokenize", self._detokenize),
            self._route("GET", "/debug/requests/{request_id}", self._timeline),
            self._route("GET", "/version", self._version, is_open=True),
            self._route("GET", "/metrics", self._get_metrics, is_open=True),
            self._route("GET", "/health", self._ready, is_open=True),
            self._route("GET", "/health/ready", self._ready, is_open=True),
            self._route("GET", "/health/live", self._live, is_open=True),
        ]

    def _route(
        self, method: str, path: str, endpoint: Endpoint, *, id_prefix: str = "req", is_open: bool = False
    ) -> Route:
        return Route(path, _Endpoint(self, endpoint, id_prefix, is_open=is_open), methods=[method])

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves HTTP requests only."""
        if scope["type"] != "http":
            return
        scope["app"] = self  # makes the router raise, instead of answering in plain text
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            outcome = Outcome.METHOD_NOT_ALLOWED if error.status_code == 405 else Outcome.NOT_FOUND
            what = f"{scope['method']} {scope['path'][:200]}"
            message = f"no such endpoint: {what}" if outcome is Outcome.NOT_FOUND else f"method not allowed: {what}"
            exchange = Exchange(scope, receive, send, arrival_s=self.now(), id_prefix="req")
            if exchange.has_body:
                exchange.extra_headers.append((b"connection", b"close"))
            if error.headers:
                exchange.extra_headers.extend((k.lower().encode(), v.encode()) for k, v in error.headers.items())
            await exchange.refuse(Refused(outcome, message))

    async def run(self, exchange: Exchange, endpoint: Endpoint, *, is_open: bool) -> None:
        """One request, whatever happens in it."""
        try:
            if not is_open:
                self._authorize(exchange)
            await endpoint(exchange)
        except InvalidRequest as error:
            await self._refuse(exchange, Refused.of(error))
        except Refused as refused:
            await self._refuse(exchange, refused)
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            await self._refuse(exchange, Refused(Outcome.ERROR, "internal error; the log names it"))
        finally:
            exchange.close()

    async def _refuse(self, exchange: Exchange, refused: Refused) -> None:
        if not exchange.is_started:
            await exchange.refuse(refused)

    def _authorize(self, exchange: Exchange) -> None:
        """Who sends it. Raises Refused. The comparison takes the same time wherever the keys differ."""
        key = _bearer_key(exchange)
        if self._key is not None and (key is None or not hmac.compare_digest(key, self._key)):
            raise Refused(Outcome.UNAUTHORIZED, "a valid API key is needed: Authorization: Bearer KEY")
        tenancy = self._tenancy
        if tenancy is not None:
            exchange.tenant = tenant = tenancy.identify(key, exchange.request_headers, exchange.client_address)
            if exchange.scope["method"] == "POST":
                exchange.late_headers = lambda: tenancy.headers(tenant)

    # Generation

    def _generate(self, make_job: JobMaker) -> Endpoint:
        async def endpoint(exchange: Exchange) -> None:
            self._check_open()
            self._running.add(exchange)
            try:
                await self._run_job(exchange, make_job)
            finally:
                self._running.discard(exchange)

        return endpoint

    async def _run_job(self, exchange: Exchange, make_job: JobMaker) -> None:
        """Refusals before submit are recorded here, later ones by the generation."""
        try:
            data = await self._read(exchange)
            exchange.watch()
            prompts = self._known_prompts()
            job = await make_job(data, exchange, prompts, self._service)
            if exchange.is_gone:
                raise exchange.gone()
        except (InvalidRequest, Refused) as error:
            refused = error if isinstance(error, Refused) else Refused.of(error)
            self._service.record(exchange.request_id, outcome=refused.outcome)
            raise refused from None
        except Exception:
            self._service.record(exchange.request_id, outcome=Outcome.ERROR)
            raise
        await answer(exchange, job, prompts, self._service, self._clock)

    def _check_open(self) -> None:
        """Raises Refused when no new request is taken."""
        if self.is_draining:
            raise Refused(Outcome.DRAINING, "the server is shutting down; no new requests are taken")

    async def _read(self, exchange: Exchange) -> bytes:
        return await exchange.read_body(max_size=self._config.max_body_size, timeout_s=self._config.read_timeout)

    def _known_prompts(self) -> Prompts:
        """Raises Refused while the model is loading."""
        model = self._service.model
        if model is None:
            raise Refused(Outcome.LOADING, "the model is still loading")
        if self._prompts is None or self._prompts.model is not model:
            self._prompts = Prompts(model, self._pool)
        return self._prompts

    # Models and text

    def _model_document(self) -> dict[str, object]:
        model = self._known_prompts().model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "tidegate",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
            **model.details,
        }

    async def _list_models(self, exchange: Exchange) -> None:
        await exchange.respond_json({"object": "list", "data": [self._model_document()]})

    async def _get_model(self, exchange: Exchange) -> None:
        self._known_prompts().check_model(exchange.scope["path_params"]["model_id"])
        await exchange.respond_json(self._model_document())

    async def _tokenize(self, exchange: Exchange) -> None:
        body, _ = parse(await self._read(exchange), TokenizeBody)
        prompts = self._known_prompts()
        prompts.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.prompt is None:
            prompt = await prompts.of_chat(body, exchange.tenant)
        else:
            prompt = await prompts.of_text(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        document: dict[str, object] = {
            "tokens": prompt.token_ids,
            "count": len(prompt.token_ids),
            "max_model_len": prompts.model.max_model_len,
        }
        if body.return_token_strs:
            document["token_strs"] = [prompts.model.tokenizer.token_text(token_id) for token_id in prompt.token_ids]
        await exchange.respond_json(document)

    async def _detokenize(self, exchange: Exchange) -> None:
        body, _ = parse(await self._read(exchange), DetokenizeBody)
        prompts = self._known_prompts()
        prompts.check_model(body.model)
        await exchange.respond_json({"prompt": await prompts.decode(body.tokens)})

    # Operations

    def health(self) -> Health:
        return Health("draining") if self.is_draining else self._service.health()

    async def _ready(self, exchange: Exchange) -> None:
        health = self.health()
        document = {"status": health.reason, **({"detail": health.detail} if health.detail else {})}
        await exchange.respond_json(document, status=_HEALTH_STATUS[health.ready])

    async def _live(self, exchange: Exchange) -> None:
        await exchange.respond_json({"status": "live"})

    async def _version(self, exchange: Exchange) -> None:
        await exchange.respond_json({"version": __version__})

    async def _get_metrics(self, exchange: Exchange) -> None:
        admin, key = self._admin_metrics, _bearer_key(exchange)
        admin_key = self._config.admin_key
        is_admin = admin_key is not None and key is not None and hmac.compare_digest(key, admin_key.encode())
        body, content_type = admin() if is_admin and admin is not None else self._metrics()
        await exchange.respond(200, body, content_type=(b"content-type", content_type.encode()))

    async def _timeline(self, exchange: Exchange) -> None:
        request_id = exchange.scope["path_params"]["request_id"]
        timeline = self._service.timeline(request_id)
        if timeline is None or timeline.get("tenant", "") != exchange.tenant.name:
            raise Refused(Outcome.NOT_FOUND, f"request '{request_id[:100]}' is not known (any more)")
        await exchange.respond_json(timeline)


def _bearer_key(exchange: Exchange) -> bytes | None:
    scheme, _, key = (exchange.header(b"authorization") or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


class _Endpoint:
    """An ASGI application around one endpoint. (Starlette would wrap a function in its own request and response.)"""

    def __init__(self, api: Api, endpoint: Endpoint, id_prefix: str, *, is_open: bool) -> None:
        self._api = api
        self._endpoint = endpoint
        self._id_prefix = id_prefix
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, arrival_s=self._api.now(), id_prefix=self._id_prefix)
        await self._api.run(exchange, self._endpoint, is_open=self._is_open)
