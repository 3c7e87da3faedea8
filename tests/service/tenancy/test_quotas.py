"""Quotas through the API and the unmodified SDK: what is refused, how, and what comes of waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tinker

from tests.service.conftest import datum
from tests.service.databases import url_of
from tests.service.inprocess import KEY, Api, Factory, api, pass_body
from tests.service.process import child, free_port
from tinsmith.errors import Busy
from tinsmith.service.config import ServeConfig
from tinsmith.service.tenancy.keys import Quotas, create_key, open_key_database, set_quotas
from tinsmith.service.tenancy.quotas import QuotaEnforcer


class Told:
    """In place of Tenants."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def quotas(self, owner: str) -> Quotas:
        return self._quotas if owner == "a" else Quotas()


class Nothing:
    """In place of Futures: nothing waits."""

    def pending(self, owner: str) -> int:
        return 0


async def limit(running: Api, **quotas: int | None) -> None:
    """The quotas of the tenant whose key the API's own is."""
    await set_quotas(running.service.store.database, "local", quotas)
    await running.service.tenants.reload()


def test_tokens_per_minute_fill_up_evenly_and_debts_are_made_up_for() -> None:
    async def main() -> None:
        now = 0.0
        quotas = QuotaEnforcer(Told(Quotas(tokens_per_minute=600)), None, Nothing(), lambda: now)  # type: ignore[arg-type]

        def goes(tokens: int, owner: str = "a") -> int:
            try:
                with quotas.reserve_request(owner, tokens):
                    return 0
            except Busy as busy:
                return busy.retry_after_ms

        assert goes(500) == 0, "a minute's tokens can be used at once"
        assert goes(400) == 0, "the last request may go beyond them"
        assert goes(1) == 30_000, "300 tokens of debt, at 10 a second; no client believes more than a minute"
        assert goes(10**9, "b") == 0
        now = 29.0
        assert 1000 <= goes(1) <= 1200
        now = 30.5
        assert goes(0) == 0
        quotas.charge("a", 605)
        assert goes(1) > 0
        now = 10_000.0
        assert goes(599) == goes(1) == 0
        assert goes(1) > 0, "an hour of rest does not add up"

    asyncio.run(main())


def test_queued_requests_are_counted_until_they_have_a_result(tmp_path: Path) -> None:
    async def main() -> None:
        go, factory = asyncio.Event(), Factory()
        factory.hook = lambda call, argument: go.wait() if call in ("run", "sample") else None
        async with api(tmp_path, factory) as running:
            model = await running.model()
            session = model.partition(":")[0]
            told = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
            sampler = (await running.post("create_sampling_session", told)).json()["sampling_session_id"]
            ask = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [5]}]}, "num_samples": 1}
            ask["sampling_params"] = {"max_tokens": 1}
            await limit(running, queued=3)
            promises = [await running.post("forward_backward", pass_body(model, seq)) for seq in (1, 2)]
            promises.append(await running.post("asample", {**ask, "seq_id": 0}))
            assert [one.status_code for one in promises] == [200] * 3
            refused = [
                await running.post("forward_backward", pass_body(model, 3)),
                await running.post("asample", {**ask, "seq_id": 1}),
            ]
            assert [one.status_code for one in refused] == [429, 429]
            assert all(0 < int(one.headers["retry-after-ms"]) <= 60_000 for one in refused)
            assert "3 requests without a result" in refused[0].json()["detail"]
            again = await running.post("forward_backward", pass_body(model, 2))
            assert again.json() == promises[1].json(), "what was promised is no new request"
            assert (await running.post("asample", {**ask, "seq_id": 0})).status_code == 200
            go.set()
            for one in promises:
                assert (await running.result(one.json())).status_code == 200
            assert (await running.post("forward_backward", pass_body(model, 3))).status_code == 200
            assert (await running.post("asample", {**ask, "seq_id": 1})).status_code == 200

    asyncio.run(main())


def test_many_at_once_do_not_slip_through(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as running:
            session = (await running.post("create_session", {"tags": []})).json()["session_id"]
            await limit(running, models=3)

            async def create(number: int) -> int:
                told = {"session_id": session, "model_seq_id": number, "base_model": "toy"}
                return (await running.post("create_model", told)).status_code

            answers = await asyncio.gather(*(create(number) for number in range(20)))
            assert sorted(answers) == [200] * 3 + [403] * 17
            await limit(running, models=None)
            assert await create(30) == 200
            await running.post(f"sessions/{session}/finish", {})

    asyncio.run(main())


def test_models_are_given_back_when_their_session_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as running:
            await limit(running, models=1)
            model = await running.model()
            told = {"session_id": model.partition(":")[0], "model_seq_id": 1, "base_model": "toy"}
            refused = await running.post("create_model", told)
            assert refused.status_code == 403
            assert "its quota is 1" in refused.json()["detail"]
            saved = await running.call("save_weights", {"model_id": model, "path": "kept", "seq_id": 1})
            refused = await running.post("load_weights", {**told, "path": saved["path"], "optimizer": False})
            assert refused.status_code == 403
            await running.post(f"sessions/{model.partition(':')[0]}/finish", {})
            for _ in range(100):
                if running.service.store.all(type(running.service.model(model, "local")))[0].state == "ended":
                    break
                await asyncio.sleep(0.01)
            assert await running.model()

    asyncio.run(main())


def test_checkpoints_are_refused_when_the_bytes_are_used_up_also_in_the_queue(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as running:
            model = await running.model()
            await limit(running, checkpoint_bytes=1)
            promises = [
                await running.post("save_weights", {"model_id": model, "path": f"c{seq}", "seq_id": seq})
                for seq in (1, 2, 3)
            ]
            results = [(await running.result(one.json())).json() for one in promises]
            assert "path" in results[0]
            assert [one["category"] for one in results[1:]] == ["user", "user"]
            assert "its quota is 1" in results[1]["error"]
            for told in ({"path": "named"}, {"sampling_session_seq_id": 5}):
                body = {"model_id": model, "seq_id": 4, **told}
                assert (await running.post("save_weights_for_sampler", body)).status_code == 403
            assert await running.step(model, 5), "training goes on"
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
        assert len([one.result().loss_fn_outputs for one in futures]) == 13, "1365 tokens, of 1200 a minute"
        with pytest.raises(tinker.PermissionDeniedError, match="its quota is 1"):
            client.create_lora_training_client("toy", rank=4).result()
        sampler = client.create_sampling_client(base_model="toy").result()
        prompt, params = tinker.ModelInput.from_ints([5, 6]), tinker.SamplingParams(max_tokens=3)
        samples = [sampler.sample(prompt, 1, params) for _ in range(10)]
        assert all(one.result().sequences for one in samples), "at most 4 at a time"
        client.close("success").result()
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_refusal_names_its_tenant_alone() -> None:
    async def main() -> None:
        quotas = QuotaEnforcer(Told(Quotas(queued=0)), None, Nothing())  # type: ignore[arg-type]
        with pytest.raises(Busy, match="a has 0 requests"), quotas.reserve_request("a", 1):
            pass
        with quotas.reserve_request("b", 1):
            pass

    asyncio.run(main())
