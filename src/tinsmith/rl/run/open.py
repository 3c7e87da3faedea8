"""How a run is opened: its folder, its log, and its parts as the configuration says, closed again in order."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager

import numpy as np
from rich.console import Console

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl.algorithms.advantages.per_token import PROCESS, PROCESS_REFERENCE
from tinsmith.rl.algorithms.algorithm import Algorithm, ColumnSource, uploadable
from tinsmith.rl.algorithms.critic import Critic
from tinsmith.rl.algorithms.gradient_check import try_loss
from tinsmith.rl.algorithms.losses.distillation import TopKDistillLoss
from tinsmith.rl.algorithms.losses.user_code import CustomLoss
from tinsmith.rl.callbacks import Callbacks
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.demonstrations import Demonstrations
from tinsmith.rl.data.tasks import HeldOutTasks, TaskSampler
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.ending.until import EndCondition
from tinsmith.rl.evaluate import Evaluator
from tinsmith.rl.guards.watchdog import watch_event_loop
from tinsmith.rl.optimizer import rate_by_name
from tinsmith.rl.policy.models import Models
from tinsmith.rl.policy.request_limit import RequestLimit, TokenRates
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.policy.training_rows import TEACHER_TOP, TrainingRow
from tinsmith.rl.record import logs, monitors
from tinsmith.rl.record.monitors.base import RunInfo
from tinsmith.rl.record.recorder import Recorder
from tinsmith.rl.record.timeline import OverlapMeter, Timeline
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rollouts.backoff import Backoff
from tinsmith.rl.rollouts.buffer import open_store
from tinsmith.rl.rollouts.filters import GroupFilters
from tinsmith.rl.rollouts.queue import BatchQueue, EmptyQueue, SavedQueue
from tinsmith.rl.rollouts.replay import BatchSelector
from tinsmith.rl.rollouts.resources import RolloutResources
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.sampler import Sampler
from tinsmith.rl.rollouts.weights import WeightPublisher
from tinsmith.rl.run.best import BestSoFar
from tinsmith.rl.run.checkpointer import Checkpointer
from tinsmith.rl.run.folder import RunFolder, shared_settings
from tinsmith.rl.run.learner import Learner
from tinsmith.rl.run.parts import (
    Connect,
    RunData,
    check_images,
    connect_policy,
    eval_context,
    eval_workflow_maker,
    folder_path,
    open_environments,
    resolve_steps,
    sampling_plan,
    training_workflow,
)
from tinsmith.rl.run.run import Run
from tinsmith.rl.run.state import RandomStates, State

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_run(
    config: RunConfig, connect: Connect, console: Console, stop: StopSignal | None = None
) -> AsyncIterator[Run]:
    """A run that is ready for its next step, for a custom training loop; `loop.loop` is the built-in loop."""
    config, data = prepare(config)
    with open_folder(config) as folder:
        async with assemble(config, folder, connect, console, data, stop or StopSignal()) as run:
            yield run


def prepare(config: RunConfig) -> tuple[RunConfig, RunData]:
    """The configuration with its learning rate and its number of steps, and the data. Raises ConfigError for a loss of
    one's own that fails."""
    if config.mode in ("both", "train") and isinstance(config.algorithm.loss, CustomLoss):
        try_loss(config.algorithm.loss)
    data = RunData(config)
    optimizer = config.optimizer.for_model(config.model.name)
    return resolve_steps(config.model_copy(update={"optimizer": optimizer}), data), data


@contextmanager
def open_folder(config: RunConfig) -> Iterator[RunFolder]:
    """The run folder, locked. A disk that is full or fails ends the block with a TinsmithError."""
    settings = config.model_dump(mode="json")
    folder = RunFolder.open(folder_path(config), settings, resume=config.resume is True, resume_from=config.resume_from)
    try:
        yield folder
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
            raise
        raise TinsmithError(
            f"The run folder {folder.path} cannot be written: {error.strerror}.",
            "Free space on its disk; the same command then continues from the last checkpoint, if there is one.",
        ) from error
    finally:
        folder.close()


@asynccontextmanager
async def assemble(
    config: RunConfig, folder: RunFolder, connect: Connect, console: Console, data: RunData, stop: StopSignal
) -> AsyncIterator[Run]:
    """A run in its folder, with its log and its watchdog."""
    with logs.log_to_folder(folder.path, config.log_level):
        monitors.announce(config.monitors, folder.path, console)
        async with _parts(config, folder, connect, console, data, stop) as run:
            start = run.steps().start
            log.info("%s: starting at step %d of %d, in %s", config.name, start, config.steps, folder.path)
            if 1 < start <= config.steps:
                console.print(f"[dim]continuing at step {start} of {config.steps}[/]", highlight=False)
            with watch_event_loop(config.rollout.max_blocking, keep_signals=stop.watches_signals):
                await run.callbacks.call("on_start", run)
                yield run


@asynccontextmanager
async def _parts(
    config: RunConfig, folder: RunFolder, connect: Connect, console: Console, data: RunData, stop: StopSignal
) -> AsyncIterator[Run]:
    """Create the parts of a run, and close them in order. Raises ConfigError before the first request to a server."""
    task_sampler, held_out = data.tasks
    runner, callbacks = RolloutRunner(config.rollout, RequestLimit(config.concurrency)), Callbacks(config.callbacks)
    async with AsyncExitStack() as stack:
        policy = await connect_policy(config, folder, connect, console)
        await check_images(data, policy.models)
        stack.push_async_callback(policy.models.close)
        records = stack.enter_context(ExitStack())
        state = folder.state
        resources = RolloutResources()
        stack.push_async_callback(resources.close)
        await open_environments(config, policy, resources)
        resources.store.update(state.store if state else {})
        filters = GroupFilters(config.filters)
        batches = await _queue(config, folder, policy, task_sampler, runner, resources, stop, filters)
        stack.push_async_callback(batches.close)
        algorithm, critic, reference = await _algorithm(config, policy, runner.requests, state)
        _announce(config, algorithm, console)
        written = monitors.build(config.monitors, _run_info(config, folder, policy), console)
        overlap = OverlapMeter(lambda: batches.busy_seconds)
        recorder = Recorder(config.steps, written, Timeline(folder.path), TokenRates(runner.requests), overlap)
        records.callback(recorder.close)
        learner = Learner(
            config=config,
            policy=policy,
            algorithm=algorithm,
            reference=reference,
            filters=filters,
            backoff=Backoff(config.active_backoff, state.backoff if state else {}),
            tasks=task_sampler,
            demonstrations=_demonstrations(config, data, policy),
            critic=critic,
            recorder=recorder,
        )
        recorder.read_at_each_step(learner.gauge)
        recorder.read_at_each_step(lambda _: resources.metrics())
        if state is not None:
            learner.restore(state)
        (state.random if state else RandomStates.seeded(config.seed)).restore()
        await batches.restore(state.batches if state else SavedQueue())
        checkpoints = _checkpointer(config, folder, batches, learner, resources)
        yield Run(
            config=config,
            batches=batches,
            learner=learner,
            evaluator=_evaluator(config, held_out, resources, runner),
            recorder=recorder,
            checkpoints=checkpoints,
            ending=checkpoints.ending,
            stop=stop,
            callbacks=callbacks,
        )


def _checkpointer(
    config: RunConfig, folder: RunFolder, batches: BatchQueue, learner: Learner, resources: RolloutResources
) -> Checkpointer:
    """What saves checkpoints, with the conditions and the best evaluation of the state that the run continues from."""
    state = folder.state
    return Checkpointer(
        config=config,
        folder=folder,
        batches=batches,
        learner=learner,
        ending=EndCondition(config.until, state.ending if state else {}),
        best=BestSoFar(config.checkpoint, state.best if state else None),
        store=resources.store,
    )


def _announce(config: RunConfig, algorithm: Algorithm, console: Console) -> None:
    console.print(f"[dim]{config.algorithm.title}: the loss is {algorithm.loss_location}[/]", highlight=False)
    if "learning_rate" not in config.optimizer.model_fields_set:
        why = "for the model's size" if rate_by_name(config.model.name) else "as its name has no size"
        rate = f"optimizer.learning_rate is not set: {config.optimizer.learning_rate:g}, {why}"
        console.print(f"[dim]{rate}[/]", highlight=False)
    if why := config.not_evaluated:
        console.print(f"[dim]held-out tasks are not evaluated: {why}[/]", highlight=False)
    if config.plugins:
        console.print(f"[dim]with plugins of {config.plugins}[/]", highlight=False)


def _run_info(config: RunConfig, folder: RunFolder, policy: Trainer) -> RunInfo:
    return RunInfo(
        name=config.name,
        folder=folder.path,
        steps=config.steps,
        start=folder.state.step if folder.state else 0,
        settings=config.model_dump(mode="json"),
        not_evaluated=config.not_evaluated,
        decode=policy.models.chat.decode,
        token_text=policy.models.chat.token_text,
    )


def _demonstrations(config: RunConfig, data: RunData, policy: Trainer) -> Demonstrations | None:
    if config.demonstrations is None:
        return None
    algorithm = config.algorithm
    _, held_out = data.tasks
    return Demonstrations(
        config.demonstrations,
        data.demonstrations,
        held_out,
        policy.models.chat,
        config.seed,
        pairs=algorithm.learns_from == "pairs",
        labels=algorithm.reads_labels,
        mismatched=algorithm.reads_mismatched,
        verdict=algorithm.verdict,
    )


async def _queue(
    config: RunConfig,
    folder: RunFolder,
    policy: Trainer,
    task_sampler: TaskSampler,
    runner: RolloutRunner,
    resources: RolloutResources,
    stop: StopSignal,
    filters: GroupFilters,
) -> BatchQueue:
    policy.models.on_outage(runner.requests.suspend)
    shared = config.mode == "train" and config.uses_rollouts
    store = open_store(config.buffer, folder.layout.buffer, config.name, shared=shared)
    if shared:
        await store.agree("train", shared_settings(config.model_dump(mode="json")))
    method = config.sync.method or ("checkpoint" if shared else "memory")
    keep = config.sync.checkpoints_to_keep(config.staleness)
    publisher = WeightPublisher(policy, store, method, keep, config.checkpoint.ttl_seconds)
    selector = BatchSelector(store, config.buffer, config.seed)
    if not config.uses_rollouts:
        return EmptyQueue(store, selector, policy, publisher, config.sync, last_step=config.steps)
    sampler = None
    if not shared:
        sampler = Sampler(
            training_workflow(config, resources),
            task_sampler,
            publisher.open,
            sampling_plan(config, filters),
            runner,
            store,
            timeout_hint="Set sync.timeout higher than a step takes.",
        )
    return BatchQueue(
        store, selector, policy, publisher, config.sync, last_step=config.steps, sampler=sampler, stop=stop
    )


def _evaluator(
    config: RunConfig, held_out: HeldOutTasks, resources: RolloutResources, runner: RolloutRunner
) -> Evaluator:
    rewards = Rewards(config.eval.rewards or config.rewards, pool=resources.scoring) if config.evaluates else None
    make_workflow, context = eval_workflow_maker(config, resources), eval_context(config, resources)
    return Evaluator(config.eval, held_out if rewards else {}, make_workflow, config.seed, runner, rewards, context)


async def _algorithm(
    config: RunConfig, policy: Trainer, requests: RequestLimit, state: State | None
) -> tuple[Algorithm, Critic | None, str]:
    """The algorithm, its critic, and the name or path of its reference model."""
    critic, reference = await _critic(config, policy, state), await _reference(config, policy, state)
    columns = _columns(config, policy, reference, critic, requests)
    extensions = policy.models.extensions
    uploaded = await _uploaded_loss(config, policy)
    algorithm = Algorithm(
        config.algorithm, extensions, columns, config.seed, config.group_size, config.updates, uploaded
    )
    return algorithm, critic, reference


async def _uploaded_loss(config: RunConfig, policy: Trainer) -> str:
    """Id of the run's loss at the server; empty if it is none of one's own, or if the server does not run it."""
    if not isinstance(config.algorithm.loss, CustomLoss):
        return ""
    try:
        return await policy.upload_loss(uploadable(config.algorithm, config.updates))
    except ValueError as error:
        log.info("The loss is computed here: %s", error)
        return ""


async def _critic(config: RunConfig, policy: Trainer, state: State | None) -> Critic | None:
    if (settings := config.algorithm.critic) is None:
        return None
    learner = await policy.auxiliary_adapter(settings.rank, config.seed, state.critic_path if state else "")
    return Critic(settings, learner, config.steps)


async def _reference(config: RunConfig, policy: Trainer, state: State | None) -> str:
    if config.algorithm.reference == "base":
        return config.model.name
    return state.reference if state else await policy.save_for_sampling("start")


def _columns(
    config: RunConfig, policy: Trainer, reference: str, critic: Critic | None, requests: RequestLimit
) -> dict[str, ColumnSource]:
    """Sources of the per-token columns that an algorithm may request."""

    def logprobs_by(name: str) -> ColumnSource:
        async def logprobs(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
            model = await policy.models.open_model(name)
            _check_tokenizer(name, model, policy.models, rows)
            return await target_logprobs(requests.around(model), rows)

        return logprobs

    def likeliest_by(name: str, count: int) -> ColumnSource:
        async def likeliest(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
            return await teacher_top(requests.around(await policy.models.open_model(name)), rows, count)

        return likeliest

    sources: dict[str, ColumnSource] = {"reference": logprobs_by(reference), "entropy": policy.entropies}
    sources["proximal"] = policy.logprobs
    if critic is not None:
        sources["values"] = critic.values
    if config.algorithm.teacher:
        sources["teacher"] = logprobs_by(config.algorithm.teacher)
    for prime in config.algorithm.primes:
        sources[PROCESS] = logprobs_by(prime.model)
        sources[PROCESS_REFERENCE] = logprobs_by(prime.reference)
    if isinstance(config.algorithm.loss, TopKDistillLoss):
        sources[TEACHER_TOP] = likeliest_by(config.algorithm.teacher, config.algorithm.loss.k)
    return sources


def _check_tokenizer(name: str, model: Snapshot, policy: Models, rows: Sequence[TrainingRow]) -> None:
    """Raise ConfigError if a model reads the tokens of the policy as other texts."""
    for row in rows if model.chat is not policy.chat else ():
        tokens = row.targets.tolist()
        if model.chat.decode(tokens) != policy.chat.decode(tokens):
            raise ConfigError(
                f"{name} has another tokenizer than the policy, whose tokens it is to score.",
                "Name a model with the same.",
            )


async def target_logprobs(snapshot: Snapshot, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
    """Logprobs of the targets of each row, float32 [N]."""
    return list(await asyncio.gather(*(snapshot.logprobs(row.sequence) for row in rows)))


async def teacher_top(snapshot: Snapshot, rows: Sequence[TrainingRow], count: int) -> list[np.ndarray]:
    """The column TEACHER_TOP of each row, float64 [N, 2, K]."""
    scored = await asyncio.gather(*(snapshot.top_prompt_logprobs(row.sequence, count) for row in rows))
    return [np.stack([ids_NK, logprobs_NK], axis=1) for ids_NK, logprobs_NK in scored]
