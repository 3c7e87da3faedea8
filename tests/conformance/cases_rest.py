"""Cases of RestClient and AdminClient."""

from __future__ import annotations

import urllib.request
from datetime import UTC, datetime, timedelta

import pytest
import tinker
from tinker import types

from tests.conformance.catalog import case
from tests.conformance.world import World, fresh, params, prompt


def split(path: str) -> tuple[str, str]:
    """(run, two-part checkpoint id)."""
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return run, checkpoint


@case("RestClient.list_training_runs")
def list_runs(world: World) -> None:
    run = world.plain().train().get_info().model_id
    page = world.call(world.rest.list_training_runs, limit=5)
    assert page.training_runs[0].training_run_id == run
    assert page.cursor.total_count >= 1
    assert len(world.call(world.rest.list_training_runs, 1, 0, "accessible").training_runs) == 1


@case("RestClient.get_training_run", "RestClient.get_training_run_by_tinker_path")
def get_run(world: World) -> None:
    model, path = world.saved(user_metadata={"a": "b"})
    for run in (
        world.call(world.rest.get_training_run, model.get_info().model_id),
        world.call(world.rest.get_training_run_by_tinker_path, path),
    ):
        assert (run.base_model, run.lora_rank, run.user_metadata) == (world.model, 4, {"a": "b"})
        assert run.last_checkpoint.tinker_path == path
        assert run.last_request_time.tzinfo is not None
    with pytest.raises(tinker.NotFoundError):
        world.rest.get_training_run("nobody:train:0").result()


@case("RestClient.list_checkpoints", "RestClient.list_user_checkpoints")
def list_checkpoints(world: World) -> None:
    model, path = world.saved()
    sampler = model.save_weights_for_sampler(fresh("s")).result().path
    of_run = world.call(world.rest.list_checkpoints, split(path)[0]).checkpoints
    assert {item.tinker_path for item in of_run} == {path, sampler}
    everywhere = world.call(world.rest.list_user_checkpoints, 2, 0).checkpoints
    assert [checkpoint.tinker_path for checkpoint in everywhere] == [sampler, path]  # newest first
    assert all(checkpoint.time.tzinfo is not None for checkpoint in everywhere)


@case("RestClient.delete_checkpoint", "RestClient.delete_checkpoint_from_tinker_path")
def delete(world: World) -> None:
    model, path = world.saved()
    other = model.save_state(fresh("other")).result().path
    world.call(world.rest.delete_checkpoint, *split(path))
    world.call(world.rest.delete_checkpoint_from_tinker_path, other)
    assert world.rest.list_checkpoints(split(path)[0]).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError):
        world.rest.delete_checkpoint_from_tinker_path(path).result()


@case("RestClient.publish_checkpoint_from_tinker_path", "RestClient.unpublish_checkpoint_from_tinker_path")
def publish(world: World) -> None:
    _, path = world.saved()

    def public() -> bool:
        [row] = world.rest.list_checkpoints(split(path)[0]).result().checkpoints
        return row.public

    for method, state in (
        (world.rest.publish_checkpoint_from_tinker_path, True),
        (world.rest.publish_checkpoint_from_tinker_path, True),
        (world.rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        world.call(method, path)
        assert public() is state


@case("RestClient.set_checkpoint_ttl_from_tinker_path")
def ttl(world: World) -> None:
    _, path = world.saved()
    world.call(world.rest.set_checkpoint_ttl_from_tinker_path, path, 7200)
    [row] = world.rest.list_checkpoints(split(path)[0]).result().checkpoints
    assert timedelta(hours=1) < row.expires_at - datetime.now(UTC) < timedelta(hours=3)
    world.call(world.rest.set_checkpoint_ttl_from_tinker_path, path, None)
    assert world.rest.list_checkpoints(split(path)[0]).result().checkpoints[0].expires_at is None
    with pytest.raises(tinker.BadRequestError):
        world.rest.set_checkpoint_ttl_from_tinker_path(path, 5).result()


@case("RestClient.get_weights_info_by_tinker_path")
def weights_info(world: World) -> None:
    _, path = world.saved(train_unembed=False)
    info = world.call(world.rest.get_weights_info_by_tinker_path, path)
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_unembed) == (world.model, True, 4, False)


@case("RestClient.list_sessions", "RestClient.get_session", "RestClient.search_sessions")
def sessions(world: World) -> None:
    model = world.plain().train()
    session = world.session()
    assert session in world.call(world.rest.list_sessions, 1000).sessions
    assert model.get_info().model_id in world.call(world.rest.get_session, session).training_run_ids
    request = types.SessionSearchRequest(session_id=session)
    [row] = world.call(world.rest.search_sessions, request).sessions
    assert row.session_id == session
    with pytest.raises(tinker.NotFoundError):
        world.rest.get_session("nobody").result()


@case("RestClient.assign_session_project")
def project(world: World) -> None:
    client = tinker.ServiceClient(base_url=world.url, api_key=world.key)
    model = client.create_lora_training_client(world.model, rank=2).result()
    world.call(world.rest.assign_session_project, client.holder.get_session_id(), "conformance")
    runs = world.rest.list_training_runs(limit=5, project_id="conformance").result().training_runs
    assert model.get_info().model_id in [run.training_run_id for run in runs]
    client.close("success").result()


@case("RestClient.export_session_trace")
def trace(world: World) -> None:
    world.saved()
    link = world.call(world.rest.export_session_trace, world.session())
    with urllib.request.urlopen(link) as answer:
        assert len(answer.read()) > 100


@case("RestClient.get_sampler")
def get_sampler(world: World) -> None:
    model = world.plain().train()
    path = model.save_weights_for_sampler(fresh("s")).result().path
    sampler = world.plain().sampler(base_model=None, model_path=path)
    assert sampler.sample(prompt(), 1, params()).result().sequences
    samplers = world.rest.get_session(world.session()).result().sampler_ids
    assert world.call(world.rest.get_sampler, samplers[-1]).sampler_id == samplers[-1]
    assert path in [world.rest.get_sampler(item).result().model_path for item in samplers]


@case("RestClient.whoami")
def whoami(world: World) -> None:
    assert world.call(world.rest.whoami).user_urn


@case("AdminClient.get_audit_log", "RestClient.get_audit_log")
def audit(world: World) -> None:
    world.saved()
    for client in (world.admin, world.rest):
        world.call(client.get_audit_log)
        assert isinstance(world.call(client.get_audit_log, "checkpoints", datetime.now(UTC).date()).entries, list)


@case("AdminClient.get_billing_usage", "RestClient.get_billing_usage")
def billing(world: World) -> None:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    for client in (world.admin, world.rest):
        row = world.call(client.get_billing_usage, now - timedelta(days=1), now + timedelta(days=1))
        assert isinstance(row.data, list)


@case("AdminClient.get_current_checkpoint_storage_usage", "RestClient.get_current_checkpoint_storage_usage")
def storage(world: World) -> None:
    world.saved()
    for client in (world.admin, world.rest):
        assert isinstance(world.call(client.get_current_checkpoint_storage_usage).data, list)
