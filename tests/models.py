"""Tiny random base models with a real tokenizer, written to a folder as transformers would.

Five shapes, each with something that an engine can get wrong: grouped-query attention with tied embeddings (llama), an
unembedding of its own (untied), widths that compiled functions multiply (aligned), q and k norms with a head size of
its own (qwen3), biases on q, k and v with a vocabulary padded beyond the tokenizer (qwen2). About half a million
parameters; the weights are larger than usual, so that the next-token distributions are far from flat.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 512
CONTEXT = 1024
KINDS = ("llama", "untied", "aligned", "qwen3", "qwen2")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "What is 39 + 13? Answer with the number only.",
    "The quick brown fox jumps over the lazy dog, then sleeps until the evening.",
    "A smith of tin works with small tools: the work is in the hands, not in the hammer.",
    "Add the numbers, subtract the numbers, and answer with one number: 0 1 2 3 4 5 6 7 8 9 10 11 12 20 30 40 50 99.",
    "user system assistant question answer reward token model step group policy task",
)


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens with the ChatML template; any text goes through it and comes back."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS * 4, trainer)
    missing = VOCABULARY - bpe.get_vocab_size()
    bpe.add_tokens([f"<filler{index}>" for index in range(missing)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """A base model of one of KINDS with its tokenizer, float32; returns the folder."""
    torch.manual_seed(seed)
    model = _model(kind)
    _roughen(model)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def _roughen(model: PreTrainedModel) -> None:
    """Undo what fresh weights hide: flat distributions, norms that are all one, biases that are all zero."""
    with torch.no_grad():
        model.lm_head.weight.mul_(2.5)  # with tied embeddings this is their one tensor
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                parameter.normal_(std=0.3)


def _model(kind: str) -> PreTrainedModel:
    shape = {
        "hidden_size": 96,
        "intermediate_size": 208,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.08,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **shape))
    if kind == "untied":
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **shape))
    if kind == "aligned":
        shape |= {"intermediate_size": 192, "num_attention_heads": 6}
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **shape))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=True, head_dim=32, **shape))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY + 24, tie_word_embeddings=True, **shape))
    raise ValueError(f"no tiny model called {kind}; there are {', '.join(KINDS)}")
