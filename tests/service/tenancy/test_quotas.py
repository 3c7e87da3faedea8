"""Quotas through the API and the unmodified SDK."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tinker

from tests.service.conftest import datum
from tests.service.support.databases import url_of
from tests.service.support.inprocess import KEY, Api, Factory, api, pass_body, until
from tests.service.support.process import child, free_port
from tinsmith.errors import Busy
from tinsmith.service.config import ServeConfig
from tinsmith.service.tenancy.keys import Quotas, create_key, open_key_database, set_quotas
from tinsmith.service.tenancy.quotas import QuotaEnforcer

pytestmark = pytest.mark.e2e


class FixedQuotas:
    """Stands in for Tenants: quotas for tenant `a` only."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def quotas(self, owner: str) -> Quotas:
        return self._quotas if owner == "a" else Quotas()


class NoFutures:
    """Stands in for Futures: no request is pending."""

    def pending(self, owner: str) -> int:
        return 0


async def limit(running: Api, **quotas: int | None) -> None:
    """Set the quotas of the tenant of the server key."""
    await set_quotas(running.service.store.database, "local", quotas)
    await running.service.tenants.reload()


def test_token_rate_refills_evenly_and_debt_is_repaid() -> None:
    async def main() -> None:
        now = 0.0
        quotas = QuotaEnforcer(FixedQuotas(Quotas(tokens_per_minute=600)), None, NoFutures(), lambda: now)  # type: ignore[arg-type]

        def wait_ms(tokens: int, owner: str = "a") -> int:
            try:
                with quotas.reserve_request(owner, tokens):
                    return 0
            except Busy as busy:
                return busy.retry_after_ms

        assert wait_ms(500) == 0, "a minute's tokens can be used at once"
        assert wait_ms(400) == 0, "the last request may exceed the rate"
        assert wait_ms(1) == 30_000, "300 tokens of debt at 10 per second"
        assert wait_ms(10**9, "b") == 0
        now = 29.0
        assert 1000 <= wait_ms(1) <= 1200
        now = 30.5
        assert wait_ms(0) == 0
        quotas.charge("a", 605)
        assert wait_ms(1) > 0
        now = 10_000.0
        assert wait_ms(599) == wait_ms(1) == 0
        assert wait_ms(1) > 0, "unused tokens do not accumulate beyond a minute"

    asyncio.run(main())


def test_queued_requests_are_counted_until_they_have_a_result(tmp_path: Path) -> None:
    async def main() -> None:
        go, factory = asyncio.Event(), Factory()
        factory.hook = lambda call, argument: go.wait() if call in ("run", "sample") else None
        async with api(tmp_path, factory) as running:
            model = await running.model()
            session = model.partition(":")[0]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
            sampler = (await running.post("create_sampling_session", body)).json()["sampling_session_id"]
            ask = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [5]}]}, "num_samples": 1}
            ask["sampling_params"] = {"max_tokens": 1}
            await limit(running, queued=3)
            promises = [await running.post("forward_backward", pass_body(model, seq)) for seq in (1, 2)]
            promises.append(await running.post("asample", {**ask, "seq_id": 0}))
            assert [promise.status_code for promise in promises] == [200] * 3
            refused = [
                await running.post("forward_backward", pass_body(model, 3)),
                await running.post("asample", {**ask, "seq_id": 1}),
            ]
            assert [answer.status_code for answer in refused] == [429, 429]
            assert all(0 < int(answer.headers["retry-after-ms"]) <= 60_000 for answer in refused)
            assert "3 requests without a result" in refused[0].json()["detail"]
            again = await running.post("forward_backward", pass_body(model, 2))
            assert again.json() == promises[1].json(), "a repeat is not a new request"
            assert (await running.post("asample", {**ask, "seq_id": 0})).status_code == 200
            go.set()
            for promise in promises:
                assert (await running.result(promise.json())).status_code == 200
            assert (await running.post("forward_backward", pass_body(model, 3))).status_code == 200
            assert (await running.post("asample", {**ask, "seq_id": 1})).status_code == 200

    asyncio.run(main())


def test_concurrent_requests_do_not_exceed_a_quota(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as running:
            session = (await running.post("create_session", {"tags": []})).json()["session_id"]
            await limit(running, models=3)

            async def create(number: int) -> int:
                body = {"session_id": session, "model_seq_id": number, "base_model": "toy"}
                return (await running.post("create_model", body)).status_code

            answers = await asyncio.gather(*(create(number) for number in range(20)))
            assert sorted(answers) == [200] * 3 + [403] * 17
            await limit(running, models=None)
            assert await create(30) == 200
            await running.post(f"sessions/{session}/finish", {})

    asyncio.run(main())


def test_model_quota_is_freed_when_a_session_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as running:
            await limit(running, models=1)
            model = await running.model()
            body = {"session_id": model.partition(":")[0], "model_seq_id": 1, "base_model": "toy"}
            refused = await running.post("create_model", body)
            assert refused.status_code == 403
            assert "its quota is 1" in refused.json()["detail"]
            saved = await running.call("save_weights", {"model_id": model, "path": "kept", "seq_id": 1})
            refused = await running.post("load_weights", {**body, "path": saved["path"], "optimizer": False})
            assert refused.status_code == 403
            await running.post(f"sessions/{model.partition(':')[0]}/finish", {})
            await until(lambda: running.service.model(model, "local").state == "ended")
            assert await running.model()

    asyncio.run(main())


def test_byte_quota_refuses_new_and_queued_checkpoints(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as running:
            model = await running.model()
            await limit(running, checkpoint_bytes=1)
            promises = [
                await running.post("save_weights", {"model_id": model, "path": f"c{seq}", "seq_id": seq})
                for seq in (1, 2, 3)
            ]
            results = [(await running.result(promise.json())).json() for promise in promises]
            assert "path" in results[0]
            assert [result["category"] for result in results[1:]] == ["user", "user"]
            assert "its quota is 1" in results[1]["error"]
            for options in ({"path": "named"}, {"sampling_session_seq_id": 5}):
                body = {"model_id": model, "seq_id": 4, **options}
                assert (await running.post("save_weights_for_sampler", body)).status_code == 403
            assert await running.step(model, 5), "training continues"
            await running.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/c1")
            assert "path" in await running.call("save_weights", {"model_id": model, "path": "c9", "seq_id": 6})

    asyncio.run(main())


def test_sdk_retries_rates_and_raises_hard_limits(tmp_path: Path) -> None:
    key = ""

    async def prepare() -> None:
        nonlocal key
        async with open_key_database(tmp_path, url_of(tmp_path)) as engine:
            key, _ = await create_key(engine, "alice", "alice")
            await set_quotas(engine, "alice", {"models": 1, "tokens_per_minute": 1200, "queued": 4})

    asyncio.run(prepare())
    config = ServeConfig(models=("toy",), engine="fake", data=tmp_path, api_key=KEY, port=free_port())
    with child(config, delay=0.05) as served:
        client = tinker.ServiceClient(base_url=served.url, api_key=key)
        model = client.create_lora_training_client("toy", rank=4).result()
        futures = [model.forward_backward([datum(list(range(3, 109)))], "cross_entropy") for _ in range(13)]
        assert len([future.result().loss_fn_outputs for future in futures]) == 13, "1365 tokens, of 1200 a minute"
        with pytest.raises(tinker.PermissionDeniedError, match="its quota is 1"):
            client.create_lora_training_client("toy", rank=4).result()
        sampler = client.create_sampling_client(base_model="toy").result()
        prompt, params = tinker.ModelInput.from_ints([5, 6]), tinker.SamplingParams(max_tokens=3)
        samples = [sampler.sample(prompt, 1, params) for _ in range(10)]
        assert all(sample.result().sequences for sample in samples), "at most 4 at a time"
        client.close("success").result()
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_refusal_applies_to_its_tenant_only() -> None:
    async def main() -> None:
        quotas = QuotaEnforcer(FixedQuotas(Quotas(queued=0)), None, NoFutures())  # type: ignore[arg-type]
        with pytest.raises(Busy, match="a has 0 requests"), quotas.reserve_request("a", 1):
            pass
        with quotas.reserve_request("b", 1):
            pass

    asyncio.run(main())
