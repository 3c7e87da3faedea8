"""RestClient and AdminClient of the unmodified SDK against a served fake engine."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import pyrage
import pytest
import tinker
from safetensors.numpy import load
from tinker import types
from tinker.lib._jwt_auth import JwtAuthProvider

from tests.service.conftest import Served, datum
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded


@pytest.fixture(scope="module")
def rest(served: Served) -> tinker.RestClient:
    return tinker.RestClient(base_url=served.url, api_key=served.key)


@pytest.fixture
def raw(served: Served) -> Iterator[Callable[..., httpx.Response]]:
    with served.raw() as call:
        yield call


def run_of(path: str) -> str:
    return types.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id


def step(train: tinker.TrainingClient) -> None:
    train.forward_backward([datum([5, 6, 7], weights=[1.0, 1.0])], "cross_entropy").result()
    train.optim_step(types.AdamParams(learning_rate=0.02)).result()


def test_pages_training_runs_newest_first(rest: tinker.RestClient, client: tinker.ServiceClient) -> None:
    made = [
        client.create_lora_training_client("toy", rank=rank, user_metadata={"rank": str(rank)}).result()
        for rank in (1, 2, 3)
    ]
    ids = [item.get_info().model_id for item in made]
    page = rest.list_training_runs(limit=2).result()
    assert [run.training_run_id for run in page.training_runs] == ids[:0:-1]
    assert page.cursor.limit == 2
    total = page.cursor.total_count
    rest_of_them = rest.list_training_runs(limit=1000, offset=2).result()
    assert rest_of_them.training_runs[0].training_run_id == ids[0]
    assert len(rest_of_them.training_runs) == total - 2
    assert rest_of_them.training_runs[0].user_metadata == {"rank": "1"}
    assert rest_of_them.training_runs[0].lora_rank == 1
    assert rest.list_training_runs(limit=5, offset=total).result().training_runs == []


def test_run_has_its_last_checkpoints(rest: tinker.RestClient, train: tinker.TrainingClient) -> None:
    before = datetime.now(UTC)
    paths = [train.save_state(name).result().path for name in ("first", "last")]
    sampler = train.save_weights_for_sampler("s").result().path
    run = rest.get_training_run_by_tinker_path(sampler).result()
    assert run.last_checkpoint.tinker_path == paths[-1]
    assert run.last_sampler_checkpoint.tinker_path == sampler
    assert before < run.last_request_time
    assert not run.corrupted
    assert (run.is_lora, run.lora_rank, run.base_model) == (True, 4, "toy")
    listed = rest.list_checkpoints(run.training_run_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in listed] == [sampler, *paths[::-1]]
    assert all(checkpoint.time.tzinfo is not None and checkpoint.size_bytes > 0 for checkpoint in listed)


def test_pages_checkpoints_of_all_runs_newest_first(rest: tinker.RestClient, client: tinker.ServiceClient) -> None:
    paths = []
    for _ in range(2):
        train = client.create_lora_training_client("toy", rank=2).result()
        paths += [train.save_state(name, user_metadata={"n": name}).result().path for name in ("a=1", "b.2")]
    page = rest.list_user_checkpoints(limit=3).result()
    assert [checkpoint.tinker_path for checkpoint in page.checkpoints] == paths[:0:-1]
    assert page.checkpoints[0].user_metadata == {"n": "b.2"}
    more = rest.list_user_checkpoints(limit=1000, offset=3).result()
    assert more.checkpoints[0].tinker_path == paths[0]
    assert more.cursor.total_count == 3 + len(more.checkpoints)


def test_publish_and_unpublish_are_idempotent(rest: tinker.RestClient, train: tinker.TrainingClient) -> None:
    path = train.save_state("shared").result().path
    run = run_of(path)

    def public() -> bool:
        [checkpoint] = rest.list_checkpoints(run).result().checkpoints
        return checkpoint.public

    assert not public()
    for _ in range(2):  # the client would repeat a conflict for minutes
        rest.publish_checkpoint_from_tinker_path(path).result(timeout=240)
        assert public()
    for _ in range(2):
        rest.unpublish_checkpoint_from_tinker_path(path).result(timeout=240)
        assert not public()


def test_ttl_is_set_and_removed(rest: tinker.RestClient, train: tinker.TrainingClient, raw) -> None:
    path = train.save_state("timed", ttl_seconds=3600).result().path
    run = run_of(path)

    def left() -> float | None:
        [checkpoint] = rest.list_checkpoints(run).result().checkpoints
        return (checkpoint.expires_at - datetime.now(UTC)).total_seconds() if checkpoint.expires_at else None

    assert 3590 < left() <= 3600
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    assert 7190 < left() <= 7200
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert left() is None
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds is 5"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 5).result()


def test_missing_ttl_differs_from_null(served: Served, train: tinker.TrainingClient) -> None:
    path = train.save_state("kept", ttl_seconds=3600).result().path
    run = run_of(path)
    with httpx.Client(base_url=served.url, headers={"X-API-Key": served.key}, timeout=60) as http:
        url = f"/api/v1/training_runs/{run}/checkpoints/weights/kept/ttl"
        assert http.put(url, json={}).status_code == 400
        assert http.put(url, json={"ttl_seconds": None}).status_code == 204


def test_weights_info_of_every_kind(rest: tinker.RestClient, client: tinker.ServiceClient) -> None:
    train = client.create_lora_training_client("toy", rank=3, train_mlp=False).result()
    saves = (train.save_state("w"), train.save_weights_for_sampler("s"), train.save_weights_external("e"))
    for path in [save.result().path for save in saves]:
        info = rest.get_weights_info_by_tinker_path(path).result()
        assert (info.base_model, info.lora_rank, info.train_mlp, info.train_attn) == ("toy", 3, False, True)


def test_external_weights_download_without_a_key(rest: tinker.RestClient, train: tinker.TrainingClient) -> None:
    step(train)
    saved = train.save_weights_external("out", ttl_seconds=3600).result()
    assert saved.path.endswith("/external_weights/out")
    answer = rest.get_external_weights_urls(saved.path).result()
    assert timedelta(minutes=50) < answer.expires - datetime.now(UTC) <= timedelta(hours=1)
    assert sorted(answer.urls) == ["adapter_config.json", "adapter_model.safetensors"]
    fetched = {}
    for name, url in answer.urls.items():
        with urllib.request.urlopen(url) as response:
            fetched[name] = response.read()
            assert int(response.headers["Content-Length"]) == len(fetched[name])
    assert json.loads(fetched["adapter_config.json"])["r"] == 4
    assert any(
        np.any(tensor) for name, tensor in load(fetched["adapter_model.safetensors"]).items() if "lora_B" in name
    )
    [listed] = rest.list_checkpoints(run_of(saved.path)).result().checkpoints
    assert (listed.checkpoint_type, listed.size_bytes) == ("external", sum(map(len, fetched.values())))
    rest.delete_checkpoint_from_tinker_path(saved.path).result()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(answer.urls["adapter_config.json"])


@pytest.mark.parametrize("change", ["name", "expires", "signature"])
def test_rejects_forged_links(rest: tinker.RestClient, train: tinker.TrainingClient, change: str) -> None:
    path = train.save_weights_external("out").result().path
    url = httpx.URL(rest.get_external_weights_urls(path).result().urls["adapter_config.json"])
    changed = {
        "name": url.copy_with(path=url.path.replace("adapter_config.json", "adapter_model.safetensors")),
        "expires": url.copy_set_param("expires", int(time.time()) + 9999),
        "signature": url.copy_set_param("signature", "0" * 64),
    }[change]
    assert httpx.get(url, timeout=60).status_code == 200
    assert httpx.get(changed, timeout=60).status_code == 404


def test_external_weights_are_encrypted_for_recipients(
    rest: tinker.RestClient, train: tinker.TrainingClient, served: Served
) -> None:
    reader = pyrage.x25519.Identity.generate()
    path = train.save_weights_external("sealed", age_encryption_recipients=[str(reader.to_public())]).result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert sorted(urls) == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    with urllib.request.urlopen(urls["adapter_config.json.age"]) as response:
        assert json.loads(pyrage.decrypt(response.read(), [reader]))["r"] == 4
    assert not list((served.data / "checkpoints").glob(".*"))
    with pytest.raises(tinker.BadRequestError, match=r"age_encryption_recipients\[0\]"):
        train.save_weights_external("bad", age_encryption_recipients=["age1x"]).result()
    with pytest.raises(tinker.BadRequestError, match="exists"):
        train.save_weights_external("sealed").result()


def test_external_weights_cannot_be_loaded(client: tinker.ServiceClient, train: tinker.TrainingClient) -> None:
    path = train.save_weights_external("out").result().path
    with pytest.raises(tinker.BadRequestError, match="holds external weights"):
        client.create_training_client_from_state(path).result()
    with pytest.raises(tinker.BadRequestError, match="holds external weights"):
        client.create_sampling_client(model_path=path).result()


def test_copy_has_the_same_bytes_and_its_own_run(
    rest: tinker.RestClient, client: tinker.ServiceClient, train: tinker.TrainingClient, served: Served
) -> None:
    step(train)
    state = train.save_state("a").result().path
    sampler = train.save_weights_for_sampler("b").result().path
    copies = [rest.copy_weights(path, "archive", ttl_seconds=3600).result() for path in (state, sampler)]
    assert [path.split("/", 3)[3] for path in copies] == ["weights/a", "sampler_weights/b"]
    assert len({run_of(path) for path in (state, *copies)}) == 3
    for path in (state, sampler):
        rest.delete_checkpoint_from_tinker_path(path).result()
    [listed] = rest.list_checkpoints(run_of(copies[0])).result().checkpoints
    assert listed.expires_at is not None
    inherited = client.create_training_client_from_state_with_optimizer(copies[0]).result()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    ours, theirs = (
        item.compute_logprobs(prompt).result()
        for item in (
            inherited.save_weights_and_get_sampling_client().result(),
            client.create_sampling_client(model_path=copies[1]).result(),
        )
    )
    assert ours == theirs
    archived = rest.list_training_runs(project_id="archive").result().training_runs
    assert {run.training_run_id for run in archived} == {run_of(path) for path in copies}


def test_lists_sessions_with_their_resources(rest: tinker.RestClient, served: Served) -> None:
    made = tinker.ServiceClient(
        base_url=served.url, api_key=served.key, user_metadata={"team": "x"}, display_name="Nightly sweep 3"
    )
    train = made.create_lora_training_client("toy", rank=2).result()
    made.create_sampling_client(base_model="toy").result()
    model = train.get_info().model_id
    session = model.rpartition(":train:")[0]
    assert rest.list_sessions(limit=1).result().sessions == [session]
    held = rest.get_session(session).result()
    assert held.training_run_ids == [model]
    assert held.sampler_ids == [f"{session}:sample:0"]
    assert (held.user_metadata, held.display_name) == ({"team": "x"}, "Nightly sweep 3")
    rest.assign_session_project(session, "night").result()
    assert [run.training_run_id for run in rest.list_training_runs(project_id="night").result().training_runs] == [
        model
    ]
    train.save_state("a").result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [match] = rest.search_sessions(types.SessionSearchRequest(display_name="sweep NIGHT")).result().sessions
    assert (match.session_id, match.project_id, match.checkpoints_count) == (session, "night", 1)
    assert match.checkpoint_storage_bytes > 0
    assert match.status.type == "active"
    made.close("errored", "out of ideas").result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [match] = rest.search_sessions(types.SessionSearchRequest(session_id=session)).result().sessions
    assert (match.status.type, match.status.reason.type, match.status.detail) == (
        "client_finished",
        "errored",
        "out of ideas",
    )


def test_whoami_reads_the_token(rest: tinker.RestClient) -> None:
    who = rest.whoami().result()
    assert (who.user_urn, who.org_urn, who.email) == ("tml:user:local", "tml:organization:local", None)


def test_admin_client_methods(served: Served, train: tinker.TrainingClient) -> None:
    admin = tinker.AdminClient(base_url=served.url, api_key=served.key)
    step(train)
    path = train.save_state("audited").result().path
    entries = admin.get_audit_log("checkpoints").result().entries
    assert (entries[-1].event, entries[-1].event_details["tinker_path"]) == ("checkpoint_created", path)
    assert admin.get_audit_log(day=(datetime.now(UTC) - timedelta(days=2)).date()).result().entries == []
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    usage = admin.get_billing_usage(hour - timedelta(hours=1), hour + timedelta(hours=1)).result()
    session = run_of(path).partition(":")[0]
    [trained] = [
        datum
        for datum in usage.data
        if datum.session_id == session and isinstance(datum.event_info, types.TrainingBillingEvent)
    ]
    assert trained.event_info.token_count == 2
    assert trained.bucket_end - trained.bucket_start == timedelta(hours=1)
    assert session in usage.sessions
    stored = admin.get_current_checkpoint_storage_usage("default").result().data
    assert stored[0].size_bytes > 0


def test_client_requests_a_token_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK requests a token without an expiry before every call."""
    fetched: list[str] = []
    fetch = JwtAuthProvider._fetch

    async def counted(self: JwtAuthProvider) -> str:
        fetched.append(await fetch(self))
        return fetched[-1]

    monkeypatch.setattr(JwtAuthProvider, "_fetch", counted)
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    train = client.create_lora_training_client("toy", rank=2).result()
    for _ in range(3):
        step(train)
    client.close("success").result()
    assert len(fetched) == 1


def test_disabled_tokens_make_the_client_send_the_key(tmp_path: Path) -> None:
    config = ServeConfig(models=("toy",), engine="fake", data=tmp_path, tokens=False)
    with embedded(config) as (url, key):
        rest = tinker.RestClient(base_url=url, api_key=key)
        assert rest.list_sessions().result().sessions == []
        with pytest.raises(RuntimeError, match="whoami requires JWT"):
            rest.whoami().result()


def test_first_session_end_is_final(served: Served, raw: Callable[..., httpx.Response]) -> None:
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    train = client.create_lora_training_client("toy", rank=2).result()
    queued = raw("optim_step", {"model_id": train.model_id, "seq_id": 1, "adam_params": {}}).json()
    session = train.model_id.partition(":")[0]
    client.close("interrupted", "enough").result()
    ran = raw("retrieve_future", {"request_id": queued["request_id"]})
    assert "metrics" in ran.json()
    assert raw(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}).status_code == 204
    [match] = raw("sessions/search", {"session_id": session}).json()["sessions"]
    assert match["status"] == {
        "type": "client_finished",
        "reason": {"type": "interrupted"},
        "detail": "enough",
    }
    refused = raw("optim_step", {"model_id": train.model_id, "seq_id": 9, "adam_params": {}})
    assert (refused.status_code, "has ended (interrupted)" in refused.text) == (400, True)
    assert raw("session_heartbeat", {"session_id": session}).status_code == 410
    assert raw("sessions/none/finish", {}).status_code == 404


def test_session_search_pages_and_filters(served: Served, raw: Callable[..., httpx.Response]) -> None:
    names = [f"Sweep number {number}" for number in range(5)]
    for number, name in enumerate(names):
        fields = {"tags": [], "display_name": name, "user_metadata": {"n": number % 2, "of": "search"}}
        raw("create_session", fields)
    seen, cursor = [], None
    while True:
        body = {"user_metadata": {"of": "search"}, "limit": 2, **({"cursor": cursor} if cursor else {})}
        page = raw("sessions/search", body).json()
        seen += [session["display_name"] for session in page["sessions"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == names[::-1]

    def count(**filters: object) -> int:
        body = {"user_metadata": {"of": "search"}, **filters}
        return len(raw("sessions/search", body).json()["sessions"])

    assert count(user_metadata={"of": "search", "n": "1"}) == 2
    assert count(display_name="NUMBER sweep") == 5
    assert count(display_name="number 3") == 1
    assert count(statuses=[{"type": "active"}]) == 5
    assert count(statuses=[{"type": "client_finished", "reasons": ["success"]}, {"type": "failed"}]) == 0
    assert count(project_ids=["default"]) == 5
    assert count(project_ids=[]) == 0
    assert count(owner={"type": "user", "owner_urns": ["tml:user:local"]}) == 5
    assert count(owner={"type": "user", "owner_urns": ["tml:user:other"]}) == 0
    for wrong in ({"limit": 0}, {"limit": 201}, {"statuses": [{"type": "odd"}]}, {"cursor": {"last_session_id": "x"}}):
        assert raw("sessions/search", wrong).status_code == 400


def test_access_token_and_key_allow_loading(served: Served, client: tinker.ServiceClient, train, raw) -> None:
    """Both belong to the tenant; test_ownership covers other tenants."""
    path = train.save_state("lent").result().path
    url = f"training_runs/{run_of(path)}/checkpoints/weights/lent/access_token"
    token = raw(url, {"ttl_seconds": 60}).json()["weights_access_token"]
    for good in (token, served.key):
        client.create_training_client_from_state(path, weights_access_token=good).result()
    with pytest.raises(tinker.BadRequestError, match="weights_access_token is not valid"):
        client.create_training_client_from_state(path, weights_access_token="tml-no").result()


def test_deleted_checkpoint_removes_its_folder(rest, train: tinker.TrainingClient, served: Served) -> None:
    folders = set((served.data / "checkpoints").iterdir())
    path = train.save_state("gone").result().path
    [folder] = set((served.data / "checkpoints").iterdir()) - folders
    assert Path(folder, "optimizer.safetensors").is_file()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not folder.exists()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result()
