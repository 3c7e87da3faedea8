"""A Tinker server that answers everything at once and does nothing: what the SDK costs by itself.

Run as `python -m benchmarks.stub PORT`. It knows just enough for a client to make a model and step it.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import uvicorn
from fastapi import FastAPI, Request


def app() -> FastAPI:
    """Promises are numbered; what a promise was for decides what it is answered with."""
    api, numbers, answers = FastAPI(), count(), dict[str, dict[str, Any]]()

    def promise(answer: dict[str, Any]) -> dict[str, str]:
        request_id = f"request-{next(numbers)}"
        answers[request_id] = answer
        return {"request_id": request_id}

    @api.post("/api/v1/{name:path}")
    async def post(name: str, request: Request) -> dict[str, Any]:
        body = await request.json()
        if name == "create_session":
            return {"session_id": "stub"}
        if name == "create_model":
            return promise({"model_id": f"stub:train:{body['model_seq_id']}"})
        if name == "get_info":
            return {"model_id": body["model_id"], "model_data": {"model_name": "stub"}}
        if name == "optim_step":
            return promise({"metrics": {}})
        if name == "retrieve_future":
            return answers[body["request_id"]]
        return {"session_heartbeat": {"type": "session_heartbeat"}, "telemetry": {"status": "accepted"}}.get(name, {})

    return api


if __name__ == "__main__":
    uvicorn.run(app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
