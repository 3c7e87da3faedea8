"""JSON bodies of the Tinker protocol and its management API, without further validation.

Unknown fields are ignored: a newer SDK sends its new fields to every server.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from tinsmith.chat.request import describe_errors
from tinsmith.errors import BadRequest


class WireModel(BaseModel):
    """A JSON body, or a part of one."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


B = TypeVar("B", bound=WireModel)


def parse(kind: type[B], body: bytes) -> B:
    """The body as `kind`. Raises BadRequest with the invalid fields."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise BadRequest(f"The body is invalid: {describe_errors(error.errors())}") from error


class LoraBody(WireModel):
    """LoraConfig."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(WireModel):
    """OptimizerConfig; only its type is read."""

    type: str = "adamw"


class ClientConfigBody(WireModel):
    """client/config and client/dynamic_config."""

    sdk_version: str = ""


class SessionBody(WireModel):
    """create_session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(WireModel):
    """session_heartbeat."""

    session_id: str


class FinishReason(WireModel):
    """Why a client ends its session."""

    type: str = "success"


class FinishBody(WireModel):
    """sessions/{id}/finish."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


class CreateModelBody(WireModel):
    """create_model."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: dict[str, Any] | None = None


class GetInfoBody(WireModel):
    """get_info."""

    model_id: str


class UnloadBody(WireModel):
    """unload_model, called by SDKs before 0.26."""

    model_id: str


class AdamBody(WireModel):
    """AdamParams; defaults are the SDK's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class StepBody(WireModel):
    """optim_step."""

    model_id: str
    seq_id: int
    adam_params: AdamBody | None = None
    optimizer_params: OptimizerBody | None = None


class SaveBody(WireModel):
    """save_weights and save_weights_for_sampler."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveExternalBody(WireModel):
    """save_weights_external."""

    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadBody(WireModel):
    """load_weights, by model_id and seq_id or by session_id and model_seq_id."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: dict[str, Any] | None = None
    weights_access_token: str | None = None


class CustomLossInput(WireModel):
    """Input of an uploaded loss."""

    name: str
    rank: int


class CustomLossNode(WireModel):
    """One node of a torch.fx graph as data."""

    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class CustomLossGraph(WireModel):
    """An uploaded loss; 1 is the only format."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CustomLossBody(WireModel):
    """create_custom_loss."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph


class SamplingSessionBody(WireModel):
    """create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class FutureBody(WireModel):
    """retrieve_future and cancel_future."""

    request_id: str
    allow_metadata_only: bool = False


class FuturesTarget(WireModel):
    """The completion log to read."""

    sampling_session_id: str
    cloned_sampler_id: int = 0


class FuturesBody(WireModel):
    """retrieve_futures."""

    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class JoinBody(WireModel):
    """join_sampling_session."""

    sampling_session_id: str


class Chunk(WireModel):
    """Part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(WireModel):
    """ModelInput."""

    chunks: list[Chunk]


class SamplingParams(WireModel):
    """SamplingParams."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Tensor(WireModel):
    """TensorData as asample sends it."""

    data: list[int]
    dtype: str
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(WireModel):
    """asample."""

    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int = 1
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class WeightsInfoBody(WireModel):
    """weights_info."""

    tinker_path: str


class CopyBody(WireModel):
    """copy_weights, into a project or as a model of a session."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class TtlBody(WireModel):
    """checkpoints/…/ttl; an explicit null removes the expiry."""

    ttl_seconds: int | None


class LoanBody(WireModel):
    """checkpoints/…/access_token."""

    ttl_seconds: int = 86_400


class ProjectBody(WireModel):
    """sessions/{id}/project."""

    project_id: str = Field(min_length=1)


class SearchOwner(WireModel):
    """The owners whose sessions to search."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list)


class StatusQuery(WireModel):
    """A session status to match."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None


class SearchCursor(WireModel):
    """Start of the next page."""

    last_created_at: AwareDatetime
    last_session_id: str


class SearchBody(WireModel):
    """sessions/search."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None
