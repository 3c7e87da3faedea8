"""Small tokenizers of the kinds that models have, which decode tokens in different ways."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("the", "of", "token", "machine", "metric", "ab", "é")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz<>|")
FALLBACK = tuple(f"<0x{byte:02X}>" for byte in range(256))


def byte_level() -> Tokenizer:
    """Bytes as characters (GPT-2, Llama 3, Qwen), with an added token that is not special."""
    vocab = ["<|end|>", "<|stop|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġthe", "ab", "ðŁ", "âĤ", "Ċ!"]
    made = Tokenizer(models.BPE(vocab=_numbered(vocab), merges=[("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _with_added(made, ("<|end|>", "<|stop|>"), "<日本>")


def llama2() -> Tokenizer:
    """Words with a metaspace, bytes as a fallback, the first space dropped, a BOS (Llama 2, Mistral, Phi-3)."""
    made = _pieces()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def gemma() -> Tokenizer:
    """As Llama 2, with the first space kept."""
    made = _pieces()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def t5() -> Tokenizer:
    """Unigram with a metaspace."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *(f"▁{word}" for word in WORDS), *WORDS, *LETTERS]
    made = Tokenizer(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return _with_added(made, ("<s>", "</s>"))


def word_piece() -> Tokenizer:
    """Whole words and their continuations."""
    vocab = ["[UNK]", "<s>", "</s>", *WORDS, *(f"##{word}" for word in WORDS), ".", "n't"]
    made = Tokenizer(models.WordPiece(vocab=_numbered(vocab), unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    return _with_added(made, ("<s>", "</s>"))


def end_of_word() -> Tokenizer:
    """Words that end in a mark, which the last token of a text leaves out (GPT-1): text is known at its end only."""
    vocab = ["<unk>", "<s>", "</s>", *WORDS, *(f"{word}</w>" for word in WORDS)]
    made = Tokenizer(models.BPE(vocab=_numbered(vocab), merges=[], unk_token="<unk>", end_of_word_suffix="</w>"))
    made.decoder = decoders.BPEDecoder()
    return _with_added(made, ("<s>", "</s>"))


def words() -> Tokenizer:
    """Whole words, without a decoder."""
    made = Tokenizer(models.WordLevel(_numbered(["<unk>", "<s>", "</s>", *WORDS]), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_added(made, ("<s>", "</s>"))


KINDS = {
    make.__name__: cache(make) for make in (byte_level, llama2, gemma, t5, word_piece, end_of_word, words)
}  # fmt: skip


def save(kind: str, folder: Path, template: str) -> PreTrainedTokenizerFast:
    """Write a tokenizer of one of KINDS with a chat template, as transformers would."""
    first, second = list(KINDS[kind]().get_added_tokens_decoder().values())[:2]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](), bos_token=str(first), eos_token=str(second), chat_template=template
    )
    fast.save_pretrained(folder)
    return fast


def _pieces() -> Tokenizer:
    merges = {}
    for word in WORDS:
        for size in range(1, len(word)):
            merges[word[:size], word[size]] = word[: size + 1]
    merges |= {("▁", word): f"▁{word}" for word in WORDS}
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *FALLBACK,
        "▁",
        "▁▁",
        "\N{REPLACEMENT CHARACTER}",
        "é",
        *LETTERS,
        *merges.values(),
    ]
    vocab = _numbered(list(dict.fromkeys(pieces)))
    model = models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return _with_added(Tokenizer(model), ("<s>", "</s>"))


def _with_added(made: Tokenizer, special: tuple[str, ...], *others: str) -> Tokenizer:
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in others])
    return made


def _numbered(texts: list[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(texts)}
