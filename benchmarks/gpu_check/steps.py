"""The fourteen steps with their time limits and marks."""

from __future__ import annotations

from benchmarks.gpu_check import card, correctness, decoding, memory, training
from benchmarks.gpu_check.step import Mark, Step
from tinsmith.engine.model.flex_attention import MAX_VARIANTS

STEPS = (
    Step(number=0, name="card", limit_s=60, measure=card.card),
    Step(
        number=1,
        name="packed attention",
        limit_s=400,
        measure=card.packed_attention,
        marks=(
            Mark(value="failed", most=0, tiny=True),
            Mark(value="worst_error", most=1e-2, tiny=True),
            Mark(value="variants", most=MAX_VARIANTS / 2, tiny=True),
        ),
    ),
    Step(
        number=2,
        name="decode attention",
        limit_s=90,
        measure=card.decode_attention,
        marks=(Mark(value="decode_first_call_ms", most=5), Mark(value="prefix_first_call_ms", most=5)),
    ),
    Step(
        number=3,
        name="load",
        limit_s=150,
        measure=correctness.load,
        marks=(Mark(value="is_fast", least=1, tiny=True), Mark(value="warm_s", most=60)),
    ),
    Step(
        number=4,
        name="correctness",
        limit_s=180,
        measure=correctness.dense,
        marks=(
            Mark(value="float32_logprob_error", most=1e-3, tiny=True),
            Mark(value="bfloat16_logprob_error", most=0.06, tiny=True),
            Mark(value="bfloat16_gradient_error_by_peft", most=1.5, tiny=True),
            Mark(value="sampler_trainer_k2", most=1e-3, tiny=True),
            Mark(value="seed_repeats", least=1, tiny=True),
            Mark(value="deterministic_equal", least=1, tiny=True),
        ),
    ),
    Step(
        number=5,
        name="training",
        limit_s=180,
        measure=training.long_rows,
        marks=(Mark(value="tokens_per_s_2k", least=10_000), Mark(value="mfu_2k", least=0.25)),
    ),
    Step(
        number=6,
        name="against PEFT",
        limit_s=120,
        measure=training.against_peft,
        marks=(Mark(value="different_prompts_ratio", least=1.5), Mark(value="grpo_ratio", least=3.0)),
    ),
    Step(number=7, name="decoding", limit_s=180, measure=decoding.one_adapter),
    Step(
        number=8,
        name="many adapters",
        limit_s=120,
        measure=decoding.many_adapters,
        marks=(Mark(value="eight_adapters_by_one", most=1.3), Mark(value="tenants_ms", most=60)),
    ),
    Step(
        number=9,
        name="prefixes",
        limit_s=150,
        measure=decoding.prefixes,
        marks=(Mark(value="new_tokens_share", most=3), Mark(value="tree_ratio_to_separate_rows", least=5)),
    ),
    Step(number=10, name="other sizes", limit_s=150, measure=training.other_sizes),
    Step(
        number=11,
        name="memory",
        limit_s=120,
        measure=memory.limits,
        marks=(Mark(value="lives", least=1, tiny=True),),
    ),
    Step(
        number=12,
        name="families",
        limit_s=400,
        measure=correctness.families,
        marks=(
            Mark(value="Qwen3-30B-A3B: float32 logprob error", most=1e-3, tiny=True),
            Mark(value="Qwen3.5-4B: float32 logprob error", most=1e-3, tiny=True),
        ),
    ),
    Step(number=13, name="RL step", limit_s=120, measure=training.rl_step),
)
