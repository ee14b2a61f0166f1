"""Who is served first among the requests of a tier: one sort key an order, lowest first."""

from __future__ import annotations

from typing import Literal

from tidegate.request import Request

OrderName = Literal["deadline", "shortest-prefill", "fifo"]

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
