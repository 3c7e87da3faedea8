"""Routed experts of a mixture, fetched for each sample.

Two extensions of Tinsmith to the Tinker API: with `user_metadata` a session has its samples recorded, and POST
/routed_experts returns the records. Other servers have neither and are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import httpx

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl.policy.sampling import Sample, SampleRequest, SampleResult
from tinsmith.rl.policy.sdk import CONNECT_SECONDS

SESSION_METADATA = {"routed_experts": "record"}
"""user_metadata of a session that records the experts of its samples."""
ATTEMPTS = 5
TIMEOUT_S = 60.0


class RoutedExperts:
    """The records of sampled sequences at a server."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=base_url, headers={"X-API-Key": api_key}, timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_SECONDS)
        )

    async def add_records(self, request: SampleRequest, sample: Sample) -> SampleResult:
        """Middleware: adds its record to each reply."""
        result = await sample(request)
        records = await self.of(result.sequence_ids) if result.sequence_ids else []
        pairs = zip(result.turns, records, strict=True)
        return replace(result, turns=tuple(replace(turn, routed_experts=record) for turn, record in pairs))

    async def of(self, sequence_ids: Sequence[str]) -> list[str]:
        """The record of each sequence with its prompt (`routed_experts.to_text`); empty for one without."""
        body = {"sequence_ids": list(sequence_ids)}
        for attempt in range(ATTEMPTS):
            try:
                response = await self._client.post("/api/v1/routed_experts", json=body)
                response.raise_for_status()
            except httpx.HTTPError as error:
                if attempt == ATTEMPTS - 1:
                    raise TinsmithError(f"The server returns no routed experts: {error!r}.") from error
                await asyncio.sleep(2.0**attempt)
            else:
                return [text or "" for text in response.json()["routed_experts"]]
        raise AssertionError

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


async def check_routers(base_url: str, api_key: str, base_model: str) -> None:
    """Raises ConfigError unless the server records and replays the routed experts of the base model."""
    async with httpx.AsyncClient(base_url=base_url, timeout=CONNECT_SECONDS) as client:
        try:
            response = await client.get("/api/v1/get_server_capabilities", headers={"X-API-Key": api_key})
            answer = response.json() if response.is_success else {}
        except (httpx.HTTPError, ValueError):
            answer = {}
    if "return_routed_experts" not in answer.get("extensions", {}).get("asample", ()):
        raise ConfigError(
            f"The server at {base_url} does not record routed experts.", "Set model.router_replay to none."
        )
    models = {model["model_name"]: model for model in answer["supported_models"]}
    if base_model in models and not models[base_model].get("router"):
        raise ConfigError(
            f"{base_model} has no routers to replay: it is dense, or served on the general path.",
            "Set model.router_replay to none.",
        )
