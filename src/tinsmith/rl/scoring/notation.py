"""Spelling of mathematics: one form for the many ways to write the same TeX, plain text or Unicode.

Example: normalized(r"$\\left( \\dfrac12,\\, 1{,}234 \\right)$.") == r"( \\frac{1}{2}, 1234 )"
"""

from __future__ import annotations

import re

MAX_CHARACTERS = 5_000
"""Longer expressions are compared as text only."""

_ZEROS = (0xFF10, 0x0660, 0x06F0, 0x0966, 0x09E6)
"""The digits zero of full-width, Arabic, Persian, Devanagari and Bengali script; the others follow."""
_UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–‐‑﹣－", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u3000", " "),
        **dict.fromkeys("\u2009\u200a\u202f", "\\,"),
        **dict.fromkeys("\u200b\u200e\u200f\u2060\ufeff", ""),
        **{chr(zero + digit): str(digit) for zero in _ZEROS for digit in range(10)},
        **{character: f"^{{{digit}}}" for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
        **{character: f"_{{{digit}}}" for digit, character in enumerate("₀₁₂₃₄₅₆₇₈₉")},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"},
        **{"×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "⁄": "/", "±": r"\pm "},
        **{"π": r"\pi ", "∞": r"\infty ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda "},
        **{
            "≤": r"\le ",
            "≥": r"\ge ",
            "≠": r"\ne ",
            "≈": r"\approx ",
            "∪": r"\cup ",
            "∩": r"\cap ",
            "∅": r"\emptyset ",
        },
        **{"∈": r"\in ", "ℝ": r"\mathbb{R}", "°": r"^\circ ", "％": "%", "，": ", ", "（": "(", "）": ")"},
    }
)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
_BOLD = re.compile(r"(?<![\w)}])\*\*(?=\S)(.{1,2000}?)(?<=\S)\*\*(?![\w(])", re.DOTALL)
_CHOICES = re.compile(r"\(?[A-J]\)?(?:\s*(?:,|and|or|&)\s*\(?[A-J]\)?)+")
_FENCE = re.compile(r"```\w*")
_DELIMITERS = re.compile(r"\$\$|(?<!\\)\$|(?<!\\)\\[()\[\]]")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mathrm|mathbf|mathit|mathsf|mathtt|bm|boldsymbol|operatorname\*?|mbox|hbox|emph)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_WORD = re.compile(r"[A-Za-z]")
_FUNCTION = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "ln",
        "log",
        "exp",
        "lim",
        "max",
        "min",
        "gcd",
        "lcm",
    ]
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])", ""),
        (
            r"\\(?:displaystyle|textstyle|limits|rm|bf|it|mathstrut|strut|centering|normalsize|large|Large)(?![A-Za-z])",
            " ",
        ),
        (r"\\(?:textcolor|colorbox)\s*\{\w+\}|\\color\s*\{\w+\}", ""),
        (r"\\(?:hspace|vspace|phantom|hphantom|label|tag)\*?\s*\{[^{}]*\}", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge "),
        (r"\\neq(?![A-Za-z])", r"\\ne "),
        (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset "),
        (r"\\l?ldots(?![A-Za-z])|\\dots(?![A-Za-z])|…", r"\\ldots "),
        (r"(?<!\\)\\!", ""),
        (r"(?<=\d)\s*\{,\}\s*(?=\d{3})", ""),  # separators of thousands that cannot be commas of a list
        (r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\thinspace(?![A-Za-z])|\\enspace(?![A-Za-z])", " "),
        (r"\{,\}", ","),
        (r"\\\$|[€£¥₹]|\\(?:textdollar|euro|pounds)(?![A-Za-z])|(?<![A-Za-z])(?:USD|US\$|EUR)(?![A-Za-z])", ""),
        (r"\\%", "%"),
        (r"\\#", "#"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degrees?(?![A-Za-z])", r"^\\circ "),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"\\underline\s*(?=\{)", ""),
        (r"\*\*", "^"),
        (r"\s+", " "),
    )
)


def normalized(text: str) -> str:
    """The expression without delimiters, fonts, spacing, currency and final punctuation, in one spelling.

    Text longer than MAX_CHARACTERS is only stripped.
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return text
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text.translate(_UNICODE))
    text = _DELIMITERS.sub("", _FENCE.sub("", text).replace("`", ""))
    text = _BOLD.sub(r"\1", text)
    while (shorter := _TEXT.sub(_plain_or_text, text)) != text:
        text = shorter
        if len(text) > MAX_CHARACTERS:
            return text
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.replace("\\word{", "\\text{").strip().rstrip(".,;:\\ ").strip()


def words(text: str) -> str:
    """A normalized expression as lower-case words: without text commands, and with single spaces."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    return " ".join(text.casefold().replace("{", " ").replace("}", " ").split()).strip(" .,;:!?\"'")


def _plain_or_text(match: re.Match[str]) -> str:
    """The content of a text command, marked as text if it is words; numbers and symbols need no mark."""
    content = match[1].strip().strip(".,;:").strip() if _WORD.search(match[1]) else match[1]
    if content in _FUNCTION:
        return f"\\{content} "
    if content in ("e", "i", "d") and match[0].startswith("\\math"):
        return content
    if not _WORD.search(content) or re.search(r"[\\\d()^_=+]", content):
        return content if content == match[1] else f" {content} "
    if _CHOICES.fullmatch(content):
        return f" {content.replace('&', 'and')} "
    if re.fullmatch(r"(?i)and|or", content):
        return f" \\word{{{content.lower()}}} "
    return f" \\word{{{content}}} "
