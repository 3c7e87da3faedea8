"""The common way: transformers with PEFT, rows padded on the right eight at a time, `generate` prompt by prompt.

It does the same work as the engine: logprobs of every target in float32, gradients for the adapter, one AdamW step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.comparison import Setting
from benchmarks.workloads import Batch

ROWS = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def load(setting: Setting) -> PreTrainedModel:
    """The base model of a setting."""
    return AutoModelForCausalLM.from_pretrained(setting.folder, dtype=getattr(torch, setting.dtype))


class Baseline:
    """A base model with a PEFT LoRA adapter, which has the base's dtype."""

    def __init__(self, base: PreTrainedModel, rank: int, targets: Sequence[str] = TARGETS) -> None:
        self.device = base.device
        config = LoraConfig(r=rank, lora_alpha=32, target_modules=list(targets))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            self.model = get_peft_model(base, config, autocast_adapter_dtype=False)
        self.optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=1e-4)

    def train(self, rows: Sequence[np.ndarray], prompts: Sequence[int]) -> list[np.ndarray]:
        """One batch with the importance-sampling loss after each prompt, and a step; returns each row's logprobs."""
        return self.train_batch(Batch(name="", rows=list(rows), prompts=list(prompts)))

    def train_batch(self, work: Batch) -> list[np.ndarray]:
        """One batch with the importance-sampling loss, and a step; returns each row's logprobs."""
        self.model.train()
        rows = work.rows
        row_logprobs: list[np.ndarray] = []
        for first in range(0, len(rows), ROWS):
            some = rows[first : first + ROWS]
            width = max(len(row) for row in some) - 1
            ids, labels = torch.zeros((2, len(some), width), dtype=torch.long)
            mask, advantages = torch.zeros_like(ids), torch.zeros(len(some), width)
            for index, row in enumerate(some):
                length = len(row) - 1
                ids[index, :length], labels[index, :length] = torch.from_numpy(row[:-1]), torch.from_numpy(row[1:])
                mask[index, :length] = 1
                advantages[index, :length] = torch.from_numpy(work.advantages(first + index))
            ids, labels, mask, advantages = (tensor.to(self.device) for tensor in (ids, labels, mask, advantages))
            logits = self.model(input_ids=ids, attention_mask=mask).logits.float()
            logprobs = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            ratio = torch.exp(logprobs - logprobs.detach())
            (-(ratio * advantages.flatten())).sum().backward()
            values = logprobs.detach().view(len(some), width).cpu().numpy()
            row_logprobs += [values[index, : len(row) - 1].copy() for index, row in enumerate(some)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return row_logprobs

    @torch.inference_mode()
    def sample(self, prompts: Sequence[np.ndarray], samples: int, tokens: int) -> None:
        """`samples` continuations of exactly `tokens` tokens for each prompt, prompt by prompt."""
        self.model.eval()
        for prompt in prompts:
            ids = torch.from_numpy(prompt.astype(np.int64))[None].to(self.device)
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                num_return_sequences=samples,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
            assert out.shape == (samples, len(prompt) + tokens)
