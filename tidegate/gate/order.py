"""Who is served first among the requests of a tier: one sort key an order, lowest first.

The order `fair` has no such key: turns are decided as requests are handed out (fair_order.py).
"""

from __future__ import annotations

from typing import Literal

from tidegate.config import Config
from tidegate.request import Request

OrderName = Literal["deadline", "shortest-prefill", "fifo"]


def order_name(config: Config) -> OrderName | Literal["fair"]:
    """What `auto` stands for."""
    order = config.gate.order
    return order if order != "auto" else "fair" if config.tenants else "deadline"


_NO_OBJECTIVE_S = 600.0


def order_key(order: OrderName, request: Request) -> float:
    """deadline: by when its first token is due. shortest-prefill: tokens of prompt, where 100 tokens more weigh as much
    as a second of waiting, so that long prompts do not starve. fifo: when it came."""
    match order:
        case "deadline":
            slo_s = request.ttft_slo_s
            return request.arrival_s + (_NO_OBJECTIVE_S if slo_s is None else slo_s)
        case "shortest-prefill":
            return request.arrival_s + request.num_prompt_tokens / 100.0
        case "fifo":
            return request.arrival_s
