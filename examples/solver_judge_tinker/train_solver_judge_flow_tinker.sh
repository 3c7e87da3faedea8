#!/usr/bin/env bash
# Trains the solver-judge workflow on Countdown. Arguments override the settings: bash FILE.sh training.group_size=8
# The server is that of TINKER_BASE_URL and TINKER_API_KEY; without them, the run starts one on this machine.
set -euo pipefail

exec "${PYTHON:-python}" -m examples.solver_judge_tinker.train_solver_judge_flow_tinker \
    model.name=Qwen/Qwen3-4B-Instruct-2507 \
    model.lora_rank=32 \
    training.group_size=4 \
    training.learning_rate=4e-5 \
    sampling.temperature=1.0 \
    sampling.top_p=1.0 \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=true \
    algorithm.grouping_level=trajectory \
    data.max_prompt_length=2048 \
    data.max_response_length=1024 \
    data.train_batch_size=64 \
    data.val_batch_size=512 \
    trainer.total_epochs=100 \
    "trainer.logger=['console','wandb']" \
    trainer.project_name=solver-judge-tinker \
    trainer.experiment_name=countdown-solver-judge \
    trainer.val_before_train=false \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    "$@"
