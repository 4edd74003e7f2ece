"""Asking a program instead of a person: a question is posted as JSON, the answer decides.

    → POST ask_url   {"id": "…", "sandbox": "…", "host": "example.com", "port": 443, "protocol": "connect", "rule": "", …}
    ← 200            {"answer": "once" | "sandbox" | "deny", "reason": "…"}

Anything else is no answer: the question is refused. The address is the operator's own (`network.ask_url`), so it is dialled as
this machine dials, not by a sandbox's rules.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from cloche import model

_MOST_BYTES = 65536


class _Told(msgspec.Struct, forbid_unknown_fields=True):
    answer: Literal["once", "sandbox", "deny"]
    reason: str = ""


async def ask(url: str, question: model.Question) -> tuple[model.Answer, str]:
    """Raises OSError or ValueError where there is no usable answer."""
    told = await asyncio.to_thread(_post, url, msgspec.json.encode(question), question.timeout_s)
    try:
        answer = msgspec.json.decode(told, type=_Told)
    except msgspec.MsgspecError as problem:
        raise ValueError(f"it answered something else: {problem}") from None
    return answer.answer, answer.reason


def _post(url: str, body: bytes, timeout_s: float) -> bytes:
    from urllib import request

    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not an http address")
    # The scheme was looked at above.
    asked = request.Request(  # noqa: S310
        url, data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    with request.urlopen(asked, timeout=timeout_s) as answer:  # noqa: S310
        found: bytes = answer.read(_MOST_BYTES)
    return found
