"""Every public method of every client class: plain, async and through futures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tinker

from tests.conformance import cases_clients, cases_rest, cases_sampling, cases_training
from tests.conformance.catalog import CASES, case_of, methods
from tests.conformance.world import World

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("forked_programs"),
]
ROOMS = (cases_clients, cases_rest, cases_sampling, cases_training)

REAL = (
    "TrainingClient.forward_backward", "TrainingClient.forward", "TrainingClient.optim_step",
    "TrainingClient.forward_backward_custom", "TrainingClient.save_state", "TrainingClient.load_state_with_optimizer",
    "TrainingClient.save_weights_and_get_sampling_client", "TrainingClient.get_tokenizer", "SamplingClient.sample",
    "SamplingClient.compute_logprobs", "ServiceClient.create_training_client_from_state_with_optimizer",
    "TrainingClient.save_weights_external",
)  # fmt: skip


@pytest.mark.parametrize("method", methods())
def test_method(method: str, world: World, outcomes: dict[str, str]) -> None:
    case, is_async, through_future = case_of(method)
    assert case is not None, f"{method} is new in this SDK: write a case for it"
    try:
        case(replace(world, is_async=is_async, through_future=through_future))
    except (tinker.BadRequestError, tinker.NotFoundError, tinker.UnprocessableEntityError) as error:
        refused = str(error)
    except tinker.RequestFailedError as error:
        refused = str(error)
    else:
        refused = ""
    outcomes[method] = refused
    assert not (world.is_ours and refused)


def test_every_case_has_a_method() -> None:
    public = set(methods())
    assert {name for name in CASES if name not in public} == set()
    assert all(room.__doc__ for room in ROOMS)


@pytest.mark.parametrize("method", REAL)
def test_method_with_a_real_model(method: str, real: World) -> None:
    case, _, _ = case_of(method)
    assert case is not None
    case(real)
