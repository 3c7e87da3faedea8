"""JSON bodies of the Tinker protocol, without further validation; those of its management API are `management_schemas`.

Unknown fields are ignored: a newer SDK sends its new fields to every server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tinsmith.chat.request import describe_errors, first_field
from tinsmith.errors import BadRequest


class WireModel(BaseModel):
    """A JSON body, or a part of one."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


def _check_metadata(value: dict[str, Any]) -> dict[str, Any]:
    if (size := len(json.dumps(value))) > METADATA_BYTES:
        raise ValueError(f"it has {size} bytes as JSON; give at most {METADATA_BYTES}")
    return value


METADATA_BYTES = 64 * 2**10
DETAIL_CHARACTERS = 4096

Id = Annotated[str, Field(max_length=512)]
"""An id, a path, or the name of a base model."""
Label = Annotated[str, Field(max_length=256)]
"""A name that the client chooses and the service stores."""
Number = Annotated[int, Field(ge=0, lt=2**63)]
"""A number that the client counts."""
Numbers = Annotated[list[int], Field(fail_fast=True)]
"""Token ids, or parts of a tensor. Only the first that is no number is reported: there may be millions."""
Metadata = Annotated[dict[str, Any], AfterValidator(_check_metadata)]

B = TypeVar("B", bound=WireModel)


def parse(kind: type[B], body: bytes) -> B:
    """The body as `kind`. Raises BadRequest with the invalid fields."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from error


def invalid_body(error: ValidationError, names: Mapping[str, str] | None = None) -> BadRequest:
    """The error to answer with. `names`: fields that the caller knows under another name."""
    errors = error.errors(include_url=False, include_input=False)
    places = [(*((names or {}).get(str(part), part) for part in each["loc"][:1]), *each["loc"][1:]) for each in errors]
    renamed = [{**each, "loc": place} for each, place in zip(errors, places, strict=True)]
    return BadRequest(f"The body is invalid: {describe_errors(renamed)}", field=first_field(renamed))


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


class SessionBody(WireModel):
    """create_session."""

    tags: list[Label] = Field(default=[], max_length=256)
    user_metadata: Metadata | None = None
    project_id: Label | None = None
    display_name: Label | None = None


class HeartbeatBody(WireModel):
    """session_heartbeat."""

    session_id: Id


class FinishReason(WireModel):
    """Why a client ends its session."""

    type: Label = "success"


class FinishBody(WireModel):
    """sessions/{id}/finish."""

    reason: FinishReason = FinishReason()
    detail: Annotated[str, AfterValidator(lambda text: text[:DETAIL_CHARACTERS])] | None = None
    """Cut, not refused, where it is too long: a client that ends with a long traceback must be able to end."""


class LoadBaseModelBody(WireModel):
    """admin/base_models."""

    name: str
    source: str | None = None
    replace: bool = False


class CreateModelBody(WireModel):
    """create_model."""

    session_id: Id
    model_seq_id: Number
    base_model: Id
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: Metadata | None = None


class GetInfoBody(WireModel):
    """get_info."""

    model_id: Id


class UnloadBody(WireModel):
    """unload_model, called by SDKs before 0.26."""

    model_id: Id


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

    model_id: Id
    seq_id: int
    adam_params: AdamBody | None = None
    optimizer_params: OptimizerBody | None = None


class SaveBody(WireModel):
    """save_weights and save_weights_for_sampler."""

    model_id: Id
    seq_id: int
    path: Id | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Annotated[dict[str, str], AfterValidator(_check_metadata)] | None = None


class SaveExternalBody(WireModel):
    """save_weights_external."""

    model_id: Id
    seq_id: int
    path: Id
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadBody(WireModel):
    """load_weights, by model_id and seq_id or by session_id and model_seq_id."""

    path: Id
    optimizer: bool = False
    model_id: Id | None = None
    seq_id: int | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Id | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: Metadata | None = None
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

    session_id: Id
    custom_loss_seq_id: Number
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph


class SamplingSessionBody(WireModel):
    """create_sampling_session."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Id | None = None
    model_path: Id | None = None


class FutureBody(WireModel):
    """retrieve_future and cancel_future."""

    request_id: Id
    allow_metadata_only: bool = False


class FuturesTarget(WireModel):
    """The completion log to read."""

    sampling_session_id: Id
    cloned_sampler_id: Number = 0


class FuturesBody(WireModel):
    """retrieve_futures."""

    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    retrieved_request_ids: Annotated[list[Id], Field(fail_fast=True)] = []


class JoinBody(WireModel):
    """join_sampling_session."""

    sampling_session_id: Id


class Chunk(WireModel):
    """Part of a prompt: tokens, or an image in base64."""

    type: str = "encoded_text"
    tokens: Numbers = []
    data: str = ""
    format: str = ""
    expected_tokens: int | None = None
    override_dimensions: dict[Literal["width", "height"], int] | None = None


class Prompt(WireModel):
    """ModelInput."""

    chunks: Annotated[list[Chunk], Field(fail_fast=True)]


class SamplingParams(WireModel):
    """SamplingParams."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Numbers | Annotated[list[str], Field(max_length=256, fail_fast=True)] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Tensor(WireModel):
    """TensorData as asample sends it."""

    data: Numbers
    dtype: str
    shape: Numbers
    sparse_crow_indices: Numbers | None = None
    sparse_col_indices: Numbers | None = None


class SampleBody(WireModel):
    """asample."""

    sampling_session_id: Id | None = None
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
    return_routed_experts: bool = False
