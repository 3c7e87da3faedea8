"""World: a server, its clients, and calls of a method in its plain, async and future forms."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import tinker
from tinker import types

_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class World:
    """A server under test and its clients."""

    url: str
    key: str
    model: str
    is_ours: bool = False
    """The server runs the fake engine, so assertions about numbers of the engine are skipped."""
    is_async: bool = False
    """Methods are called in their deprecated `_async` form where they have one, and futures are awaited."""
    through_future: bool = False
    """Training and sampling clients are futures, which forward calls to the client that they become."""
    service: tinker.ServiceClient = field(repr=False)
    rest: tinker.RestClient = field(repr=False)
    admin: tinker.AdminClient = field(repr=False)

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The result of a method, unwrapped from futures and coroutines."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `_async` forms warn that they are deprecated
            if self.is_async:
                return asyncio.run(self._awaited(method, args, options))
            made = method(*args, **options)
            return made.result(timeout=120) if _is_future(made) and not self.through_future else made

    async def _awaited(self, method: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        owner, name = method.__self__, f"{method.__name__}_async"  # type: ignore[attr-defined]
        made = (getattr(owner, name) if name in dir(owner) else method)(*args, **options)
        while inspect.isawaitable(made):
            made = await made
        return made

    def train(self, **options: Any) -> Any:
        """A new model in training."""
        made = self.service.create_lora_training_client(self.model, **{"rank": 4, "seed": 1, **options})
        return made if self.through_future else made.result()

    def sampler(self, **options: Any) -> Any:
        """A new sampling session."""
        made = self.service.create_sampling_client(**({"base_model": self.model} | options))
        return made if self.through_future else made.result()

    def plain(self) -> World:
        """The same world with plain clients, for setup."""
        return replace(self, is_async=False, through_future=False)

    def saved(self, **options: Any) -> tuple[tinker.TrainingClient, str]:
        """(model trained for a step, path of its state)."""
        model = self.plain().train(**options)
        model.forward_backward([datum([5, 6, 7, 8])], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=0.02)).result()
        return model, model.save_state("state").result().path

    def session(self) -> str:
        """Id of the session of the clients."""
        return self.service.holder.get_session_id()


def _is_future(made: object) -> bool:
    return isinstance(made, tinker.APIFuture)


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """Position i predicts token i + 1."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def prompt(*tokens: int) -> types.ModelInput:
    """A prompt of these tokens, by default of three."""
    return types.ModelInput.from_ints(list(tokens or (5, 6, 7)))


def params(**options: Any) -> types.SamplingParams:
    """Sampling parameters, by default for four tokens."""
    return types.SamplingParams(**{"max_tokens": 4, "seed": 7, "stop": [], **options})


def fresh(name: str) -> str:
    """A name that no other case uses."""
    return f"{name}-{next(_NUMBERS)}"


def logprobs(output: types.ForwardBackwardOutput) -> list[float]:
    """Flat logprobs of the first datum."""
    return list(output.loss_fn_outputs[0]["logprobs"].data)
