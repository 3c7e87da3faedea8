"""Steps 3, 4 and 12: a model of 4 B parameters is loaded, and models of few layers are compared in float32.

Dense models are compared with transformers' eager attention in float32, then bfloat16 with float32: logprobs,
gradients, and the sampler's logprobs with the trainer's. A seed gives its tokens again, and a deterministic engine
gives the same bits twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from benchmarks.comparison import timed
from benchmarks.engine_driver import EngineDriver
from benchmarks.gpu_check.device import profile, settle
from benchmarks.gpu_check.shapes import FEW_LAYERS, Size
from benchmarks.gpu_check.step import Values
from benchmarks.parts.agreement import scored_pass
from benchmarks.workloads import Batch, grpo, questions, rows_of
from tinsmith.engine.base import SampleResult

RANK = 32
DTYPES = (torch.bfloat16, torch.float32)


def load(size: Size) -> Values:
    """Load Qwen3-4B twice: the second time, compiled kernels are in the cache on disk."""
    values: dict[str, object] = {}
    for name in ("cold", "warm"):
        loaded: list[EngineDriver] = []
        values[f"{name}_s"] = timed(lambda into=loaded: into.append(size.engine("Qwen3-4B")))
        card, sampler = loaded[0].engine.card, loaded[0].engine.sampler
        values |= {
            "path": card.path,
            "is_fast": card.path == "fast",
            "pass_tokens": card.pass_tokens,
            "cache_tokens": sampler.batch._scheduler.cache_tokens,
            "weights_gb": card.weight_bytes / 1e9,
            "free_gb": card.free_bytes / 1e9,
        }
        loaded.pop().close()
    return values


def dense(size: Size) -> Values:
    """Qwen3-4B with few layers of full width."""
    work = grpo(groups=2, group=3)
    exact = size.engine("Qwen3-4B", torch.float32, FEW_LAYERS)
    exact.create("check", RANK)
    (result,) = exact.run(work.as_pass("check"))
    expected = _eager(size.model("Qwen3-4B", torch.float32, FEW_LAYERS), work)
    apart = max(float(np.abs(actual - other).max()) for actual, other in zip(result.logprobs, expected, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        exact.step("check", 1e-3)  # so that B is not zero and A has a gradient
        state = Path(folder) / "state"
        exact.wait(exact.engine.save("check", state, optimizer=False))
        wide = _scores(exact, work)
        exact.close()
        narrow = size.engine("Qwen3-4B", torch.bfloat16, FEW_LAYERS)
        narrow.wait(narrow.engine.load("check", state, optimizer=False))
        actual = _scores(narrow, work)
        agreement = _agreement(size, narrow)
        narrow.close()
        repeated = [_deterministic(size, state, work) for _ in range(2)]
    error, usual = _distance(actual[1], wide[1]), _distance(*(_peft_gradients(size, work, dtype) for dtype in DTYPES))
    return {
        "float32_logprob_error": apart,
        "bfloat16_logprob_error": float(np.abs(actual[0] - wide[0]).mean()),
        "bfloat16_gradient_error": error,
        "bfloat16_gradient_error_by_peft": error / usual,
        **agreement,
        "deterministic_equal": repeated[0] == repeated[1],
    }


def families(size: Size) -> Values:
    """A mixture of experts and a hybrid with Gated DeltaNet: correct, and how fast."""
    values: dict[str, object] = {}
    for name, layers in (("Qwen3-30B-A3B", 6), ("Qwen3.5-4B", 8)):
        work = grpo(groups=2, group=3)
        exact = size.engine(name, torch.float32, min(layers, FEW_LAYERS))
        exact.create("check", RANK)
        (result,) = exact.run(work.as_pass("check"))
        exact.close()
        expected = _eager(size.model(name, torch.float32, min(layers, FEW_LAYERS)), work)
        errors = [float(np.abs(left - right).mean()) for left, right in zip(result.logprobs, expected, strict=True)]
        values[f"{name}: float32 logprob error"] = max(errors)
        ours = size.engine(name, torch.bfloat16, layers)
        ours.create("check", RANK)
        large = rows_of(16, 2) if size.tiny else grpo()

        def train(ours: EngineDriver = ours, large: Batch = large) -> None:
            ours.run(large.as_pass("check"))
            settle(size)

        train()
        values[f"{name}: training tokens/s, {layers} layers"] = large.tokens / min(timed(train) for _ in range(2))
        values[f"{name}: launches of a pass"] = profile(size, train).launches
        ours.close()
    return values


def _agreement(size: Size, ours: EngineDriver) -> dict[str, float | bool]:
    """What the sampler says of its tokens against what the trainer says: mean and mean square of the difference."""
    ours.capture("check", "version")
    prompts, tokens = questions(size.of(8, 2)), size.of(64, 8)
    results = ours.sample(prompts, "version", 8, tokens, seed=7)
    again = ours.sample(prompts, "version", 8, tokens, seed=7)
    rows = [
        (prompt, sequence) for prompt, result in zip(prompts, results, strict=True) for sequence in result.sequences
    ]
    (scored,) = ours.run(scored_pass([np.concatenate([prompt, sequence.tokens]) for prompt, sequence in rows], "check"))
    difference = np.concatenate(
        [
            sequence.logprobs - logprobs[len(prompt) - 1 :]
            for (prompt, sequence), logprobs in zip(rows, scored.logprobs, strict=True)
        ]
    )
    return {
        "sampler_trainer_k1": float(difference.mean()),
        "sampler_trainer_k2": float((difference**2).mean() / 2),
        "seed_repeats": _tokens(results) == _tokens(again),
    }


def _deterministic(size: Size, state: Path, work: Batch) -> list[bytes]:
    """Bits of a pass, a step and samples of a deterministic engine."""
    engine = size.engine("Qwen3-4B", torch.bfloat16, FEW_LAYERS, deterministic=True)
    engine.wait(engine.engine.load("check", state, optimizer=False))
    (result,) = engine.run(work.as_pass("check"))
    engine.step("check")
    (after,) = engine.run(work.as_pass("check"))
    engine.capture("check", "version")
    sampled = engine.sample(questions(2), "version", 2, size.of(64, 8), seed=3)
    engine.close()
    bits = [logprobs.tobytes() for logprobs in (*result.logprobs, *after.logprobs)]
    return [*bits, *_tokens(sampled)]


def _tokens(results: Sequence[SampleResult]) -> list[bytes]:
    return [sequence.tokens.tobytes() for result in results for sequence in result.sequences]


def _scores(ours: EngineDriver, work: Batch) -> tuple[np.ndarray, np.ndarray]:
    """All logprobs and all gradients, each flattened."""
    (result,) = ours.run(work.as_pass("check"))
    gradients = ours.engine.trainer.gradients("check")
    flat = [part.reshape(-1) for name in sorted(gradients) for part in gradients[name]]
    return np.concatenate(result.logprobs), np.concatenate(flat)


def _peft_gradients(size: Size, work: Batch, dtype: torch.dtype) -> np.ndarray:
    """Gradients of the policy-gradient loss by PEFT with eager attention, all adapters drawn from a seed."""
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(size.model("Qwen3-4B", dtype, FEW_LAYERS), config, autocast_adapter_dtype=False)
    for row, prompt in zip(work.rows, work.prompts, strict=True):
        ids = torch.as_tensor(row, device=size.device, dtype=torch.int64)[None]
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
        cross_entropy(logits, ids[0, 1:], reduction="none")[prompt - 1 :].sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat(gradients).float().cpu().numpy()


def _distance(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@torch.no_grad()
def _eager(model: PreTrainedModel, work: Batch) -> list[np.ndarray]:
    """Logprobs of each row by transformers."""
    logprobs = []
    for row in work.rows:
        ids = torch.as_tensor(row, device=model.device)[None]
        scores = torch.log_softmax(model(input_ids=ids[:, :-1], use_cache=False).logits[0].float(), dim=1)
        logprobs.append(scores.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy())
    return logprobs
