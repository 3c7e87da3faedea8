"""A Tinker server that responds at once and computes nothing, to measure the cost of the SDK itself.

Run as `python -m benchmarks.stub_server PORT`. It supports what a client needs to create a model, step it and
sample. As in `benchmarks.timed_service`, a sample takes `max_tokens` milliseconds and reports when it ended.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import count
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinsmith.engine.base import PassResult, SampledSequence, SampleResult
from tinsmith.service.wire.protobuf import encode_pass, encode_sampled

TRAINED = encode_pass(PassResult(logprobs=(np.zeros(8, np.float32),), metrics={"loss:sum": 0.0}))
"""The result of any forward_backward: that of one row of 8 tokens."""
FLAGS = {"sample_use_retrieve_futures": True, "sample_join_sampling_session": True, "parallel_fwdbwd_chunks": False}


class Stub:
    """State of the stub: futures are numbered, and the type of the request decides the result."""

    def __init__(self) -> None:
        self.polls = 0
        self._numbers = count()
        self._answers: dict[str, dict[str, Any]] = {}
        self._messages: dict[str, bytes] = {}
        """Results as protobuf."""
        self._ended: list[str] = []
        self._news = asyncio.Event()

    async def answer(self, name: str, request: Request) -> Response | dict[str, Any]:
        """Handle any POST request."""
        body: dict[str, Any] = {}
        if name == "forward_backward":
            await request.body()
        else:
            body = await request.json()
        if name in ("asample", "retrieve_future", "retrieve_futures"):
            return await self._sampling(name, body)
        if name == "create_model":
            return self._promise({"model_id": f"stub:train:{body['model_seq_id']}"})
        if name == "forward_backward":
            promise = self._promise({})
            self._messages[promise["request_id"]] = TRAINED
            return promise
        if name == "optim_step":
            return self._promise({"metrics": {}})
        responses = {
            "client/config": FLAGS,
            "create_session": {"session_id": "stub"},
            "create_sampling_session": {"sampling_session_id": "stub:sample:0"},
            "get_info": {"model_id": body.get("model_id"), "model_data": {"model_name": "stub"}},
            "session_heartbeat": {"type": "session_heartbeat"},
            "telemetry": {"status": "accepted"},
        }
        return responses.get(name, {})

    def _promise(self, answer: dict[str, Any]) -> dict[str, str]:
        request_id = f"request-{next(self._numbers)}"
        self._answers[request_id] = answer
        return {"request_id": request_id}

    async def _sampling(self, name: str, body: dict[str, Any]) -> Response | dict[str, Any]:
        if name == "asample":
            request_id = f"stub:sample:0:{body['seq_id']}"
            asyncio.get_running_loop().call_later(self._seconds(body), self._end, request_id)
            return {"request_id": request_id, "sample_sequence_ids": [request_id]}
        if name == "retrieve_future":
            message = self._messages.get(body["request_id"])
            if message is None:
                return self._answers[body["request_id"]]
            return Response(message, media_type="application/x-protobuf")
        self.polls += 1
        if len(self._ended) <= body["prev_cursor"] and body.get("timeout") != 0:
            self._news.clear()
            await self._news.wait()
        finished = [
            {"state": "finished", "request_id": request_id} for request_id in self._ended[body["prev_cursor"] :]
        ]
        return {"completions": finished, "cursor": len(self._ended)}

    @staticmethod
    def _seconds(body: dict[str, Any]) -> float:
        milliseconds = body["sampling_params"]["max_tokens"]
        return milliseconds / 1000 if milliseconds > 1 else 0.0

    def _end(self, request_id: str) -> None:
        tokens = np.array(divmod(time.time_ns() // 1000, 10**6), np.int32)
        sequence = SampledSequence(tokens=tokens, logprobs=np.zeros(2, np.float32), stop_reason="length")
        self._messages[request_id] = encode_sampled(SampleResult(sequences=(sequence,)), None)
        self._ended.append(request_id)
        self._news.set()


def app() -> Starlette:
    """The stub as an HTTP application."""
    stub = Stub()

    async def post(request: Request) -> Response:
        answer = await stub.answer(request.path_params["name"], request)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    async def polls(_request: Request) -> Response:
        return JSONResponse(stub.polls)

    return Starlette(routes=[Route("/api/v1/{name:path}", post, methods=["POST"]), Route("/polls", polls)])


if __name__ == "__main__":
    uvicorn.run(app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
