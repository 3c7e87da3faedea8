"""Where the answer stands in a reply. All rewards that read answers read them here.

1. Thoughts are not part of the answer: everything up to the last </think>, or from a <think> that is not closed, unless
   the reply ends in <answer>…</answer>.
2. `tagged`: the text in the last complete <answer>…</answer>.
3. `boxed`: the content of the last \\boxed or \\fbox, with or without braces. Boxes that only commas, `and` or `or`
   separate are one answer, a list. A last box that is empty or not closed is no answer, whatever stands before it.
4. `marked`: the text after ####, if it is a number or TeX on a line of its own.
5. `stated`: in prose, the expression after the last `answer is` or `answer:`, else the last expression.

Reading takes time linear in the length of the reply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tinsmith.rl.scoring.notation import normalized
from tinsmith.rl.scoring.quantities import Quantity, last_side, quantity, readings
from tinsmith.rl.scoring.structures import collection

MARK = "####"
"""The mark before the final answer in GSM8K."""
MAX_PROSE = 8_000
"""Prose is searched for an expression in so many of its last characters."""
_WINDOW = 2_000
"""Characters that are searched first."""

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_BARE = re.compile(r"\\[dt]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)|\\sqrt\s*(?:\{[^{}]*\}|\d)|[^\s$]+")
_JOIN = re.compile(
    r"[\s$.*]*(?:\\[()\[\],;! ])*[\s$]*(?:,|;|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\}|\\quad|[\s$]|\\[()\[\],;! ])*"
    r"(?:[A-Za-z](?:_\{?\w+\}?)?\s*=\s*)?"
)
_JOINER = re.compile(r"[,;]|\band\b|\bor\b")
_THOUGHTS_END = re.compile(r"</think(?:ing)?>|\[/THINK\]")
_THOUGHTS_BEGIN = re.compile(r"<think(?:ing)?>|\[THINK\]")

_MATH = (
    r"\$\$(?P<display>[^$]{1,500}?)\$\$|\\\[(?P<bracket>(?:[^\\]|\\(?!\])){1,500}?)\\\]"
    r"|\\\((?P<paren>(?:[^\\\n]|\\(?!\))){1,500}?)\\\)|(?<![\\$])\$(?=[^\s$])(?P<dollar>[^$\n]{0,499}[^\s$\\])\$(?![\d$])"
)
_SYMBOL = (
    r"[(\[{][-+−\d ./^]{1,40},[-+−\d .,/^]{1,60}[)\]}]|"
    r"\\[A-Za-z]+|\\[{}|,;:! %$&\\]|\d+(?:[.,]\d+)*|\.\d+|[-+*/^_=(){}\[\]|<>!%°−×÷·π√∞±≤≥]|"
    r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])"
)
_SPAN = re.compile(rf"{_MATH}|(?P<run>(?:{_SYMBOL})(?:[ \t]*(?:{_SYMBOL}))*)", re.ASCII)
_PHRASE = re.compile(
    r"(?i)\b(?:answer|result|solution|value)s?\b[^\n.=:$\\]{0,60}?"
    r"(?:\b(?:is|are|equals?)\b|[:=])(?:\s*(?:therefore|thus|simply|either|equal to|exactly)\b)?[\s:*]*"
)
_HTML = re.compile(r"</?[A-Za-z][A-Za-z0-9]{0,15} ?/?>")
_NOT = re.compile(r"(?i)\bnot(?: equal to)?\s*$")
_OR = re.compile(r"(?i)\bor\W{0,4}$")
_LIST = re.compile(r"(?i)\W{0,3}\s*(?:,\s*and|,\s*or|,|and|or)\s+\W{0,3}(?=[\d$\\(+-])")
_LETTERS = re.compile(r"(?<!\\)\b[A-Za-z]\b|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_PROSE = re.compile(
    r"(?i)(?<![\\A-Za-z])(?:[A-Za-z]{3,}|is|it|we|so|to|of|if|be|as|at|by|my|no|an|do|he|on|in|us|up)(?![A-Za-z])"
)
_NOT_PROSE = re.compile(
    r"\\text\{[^{}]*\}|\\(?:begin|end)\s*\{\w+\*?\}|\\[A-Za-z]+|\b(?:and|or|sin|cos|tan|log|exp|mod|max|min|gcd|lcm|sqrt|pi)\b"
)


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a reply.

    Example: Box(begin=3, end=12, content="5") for "so \\boxed{5}"
    """

    begin: int
    end: int
    content: str | None
    """None if the box is not closed or empty."""


def after_thoughts(text: str) -> str:
    """The reply after its last </think>; empty if thoughts begin and do not end."""
    ends = [match.end() for match in _THOUGHTS_END.finditer(text)]
    after = text[ends[-1] :] if ends else text
    return "" if _THOUGHTS_BEGIN.search(after) else after.strip()


def spoken(text: str) -> str:
    """`after_thoughts`, with an answer in tags at the end of a reply whose thoughts are not closed."""
    after = after_thoughts(text)
    if not after and text.rstrip().lower().endswith("</answer>"):
        begin = text.lower().rfind("<answer>")
        return text[begin:].strip() if begin >= 0 else ""
    return after


def last_tagged(text: str, tag: str, *, ignore_case: bool = False) -> str | None:
    """Return the text in the last complete <tag>…</tag>, stripped; None if there is none. It may have several lines."""
    flags = re.IGNORECASE if ignore_case else re.NOFLAG
    begin, content = -1, None
    for match in re.finditer(rf"<(/?){re.escape(tag)}>", text, flags):
        if not match[1]:
            begin = match.end()
        elif begin >= 0:
            content, begin = text[begin : match.start()], -1
    return None if content is None else content.strip()


def last_box(text: str) -> Box | None:
    """The last \\boxed or \\fbox of the text; None if it has none."""
    matches = list(_BOX.finditer(text))
    return _box(text, matches[-1]) if matches else None


def boxed(text: str) -> str | None:
    """The content of the last \\boxed or \\fbox, or of several that are one list, separated by commas; None without any
    and if the last is not closed or empty."""
    boxes = [_box(text, match) for match in list(_BOX.finditer(text))[-16:]]
    if not boxes or boxes[-1].content is None:
        return None
    contents = [boxes[-1].content]
    for before, after in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = text[before.end : after.begin]
        if before.content is None or len(between) > 40 or not _JOINER.search(between) or not _JOIN.fullmatch(between):
            break
        if before.content not in contents:
            contents.insert(0, before.content)
    return ", ".join(contents)


def answer_text(text: str) -> str | None:
    """The part of a reply that states its answer: tagged, boxed or marked, else all of it; None if it states none."""
    text = spoken(text)
    tagged = last_tagged(text, "answer", ignore_case=True)
    text = text if tagged is None else tagged
    if _BOX.search(text):
        return boxed(text)
    mark = marked(text)
    return text if mark is None else mark


def marked(text: str) -> str | None:
    """The text after the last ####, if it is a number or TeX alone on the rest of its line; None otherwise."""
    _, mark, after = text.rpartition(MARK)
    line = after.strip(" \t").partition("\n")[0].strip()
    if not mark or not line:
        return None
    return line if quantity(normalized(line)) is not None or re.fullmatch(r"\$[^$]+\$", line) else None


def right_answer(text: str) -> str:
    """The answer of a task, which may be bare, boxed, or the end of a solution after ####."""
    text = text.rpartition(MARK)[2].strip()
    content = boxed(text)
    return text if content is None else content


def is_prose(text: str) -> bool:
    """Whether normalized text has words beside its mathematics."""
    rest = _NOT_PROSE.sub(" ", text)
    return _PROSE.search(rest) is not None and re.search(r"\s", text.strip()) is not None


def stated(text: str) -> str | None:
    """The expression that prose states: after the last `answer is`, else the last one; None if it has none."""
    for size in (_WINDOW, MAX_PROSE):
        part = _without_tags(_tail(text, size))
        phrases = list(_PHRASE.finditer(part))
        for phrase in reversed(phrases[-4:]):
            span = _SPAN.match(part, phrase.end())
            if span is not None and (expression := _expression(span)):
                return _with_list(part, span, expression)
        expression = _last_stated(part)
        if expression or len(text) <= size:
            return expression
    return None


def stated_words(text: str) -> str:
    """The words of prose after the last `answer is` or `answer:`, up to the end of the sentence; empty without them."""
    part = _tail(text, MAX_PROSE)
    phrases = list(_PHRASE.finditer(part))
    return re.split(r"[.;!?\n]", part[phrases[-1].end() :], maxsplit=1)[0].strip(" *\"'") if phrases else ""


def last_number(text: str) -> Quantity | None:
    """The last number of prose: of a sum or an equation its last number, but a fraction or a power as a whole; None
    without any, and if the last is not rational, as \\sqrt{2}."""
    box = last_box(text)
    if box is not None and box.content is None:
        return None
    text = _BOX.sub("", text)
    for size in (_WINDOW, MAX_PROSE):
        part = _without_tags(_tail(text, size))
        for span in reversed(list(_SPAN.finditer(part))):
            expression = _expression(span)
            term = _last_term(normalized(expression)) if expression else ""
            if not re.search(r"\d", term):
                continue
            number = quantity(term)
            if number is not None or not _LETTERS.search(term):
                return number
        if len(text) <= size:
            break
    return None


def _without_tags(text: str) -> str:
    return _HTML.sub(" ", text)


def _box(text: str, match: re.Match[str]) -> Box:
    begin = match.end()
    if not text.startswith("{", begin):
        bare = _BARE.match(text, begin)
        content = bare[0].rstrip(".,;:!?*)") if bare else ""
        return Box(match.start(), begin + len(content), content or None)
    depth = 0
    for brace in _BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return Box(match.start(), brace.end(), text[begin + 1 : brace.start()].strip() or None)
    return Box(match.start(), len(text), None)


def _tail(text: str, size: int) -> str:
    """The last lines of the text that have at most `size` characters together."""
    if len(text) <= size:
        return text
    part = text[-size:]
    _, newline, after = part.partition("\n")
    return after if newline and after.strip() else part


def _expression(span: re.Match[str]) -> str:
    """The text of a span without what cannot begin or end an expression; empty if that is everything."""
    run = span["run"]
    if run is None:
        return next((content for content in span.group("display", "bracket", "paren", "dollar") if content), "").strip()
    if re.fullmatch(r"\{[^{}\\]*,[^{}\\]*\}", run):
        return f"\\{run[:-1]}\\}}"
    if run.startswith(("^", "_")):
        return ""
    run = re.sub(r"^(?:[A-Za-z]\s+)+(?=[-+\d\\(.])|^[-+*]\s+(?=[\d\\(.])|\s+[A-Za-z]$", "", run)
    run = re.sub(r"^(?:[=*/<>|)\]}!%\s]|\\[,;:! \\])+|(?:[-+*/^_=<>|(\[{\s]|\\[,;:! \\])+$", "", run)
    for begin, end in ("()", "[]", "{}"):
        while run.endswith(end) and run.count(end) > run.count(begin):
            run = run[:-1].rstrip()
        while run.startswith(begin) and run.count(begin) > run.count(end):
            run = run[1:].lstrip()
    return run


def _is_mathematical(expression: str) -> bool:
    return re.search(r"\d|\\[A-Za-z]{2}|[π√∞]|[A-Za-z]\s*[-+*/^=]", expression) is not None


def _last_stated(text: str) -> str | None:
    """The last expression of prose that no `not` precedes; with the one before it if `or` is between them."""
    last = None
    for span in reversed(list(_SPAN.finditer(text))):
        expression = _expression(span)
        begin = span.start()
        if expression and _is_mathematical(expression) and not _NOT.search(text, max(0, begin - 20), begin):
            if last is not None:
                return f"{expression}, {last}"
            if not _OR.search(text, max(0, begin - 10), begin):
                return expression
            last = expression
    return last


def _with_list(text: str, span: re.Match[str], expression: str) -> str:
    """An expression with those that follow after commas, `and` or `or`."""
    items = [expression]
    while len(items) < 16 and (comma := _LIST.match(text, span.end())):
        following = _SPAN.match(text, comma.end())
        item = _expression(following) if following else ""
        if following is None or not item:
            break
        span = following
        items.append(item)
    return ", ".join(items)


def _last_term(text: str) -> str:
    """The last number of normalized text: of the last side of an equation, the last item, the last term."""
    text = re.split(r"[<>]|\\(?:le|ge|lt|gt|ne)(?![A-Za-z])", last_side(readings(text)[0]))[-1].strip()
    items = collection(text)
    if items is not None and items.items and items.kind not in ("rows", "row"):
        return _last_term(items.items[-1])
    depth, begin, previous = 0, 0, ""
    for match in re.finditer(r"[({\[]|[)}\]]|[-+*]|\\(?:times|cdot|div|pm)(?![A-Za-z])|[^\s]", text):
        token = match[0]
        depth += (token in "({[") - (token in ")}]")
        binary = token in "-+*" or token.startswith(("\\times", "\\cdot", "\\div", "\\pm"))
        scientific = re.match(r"\s*10\s*\^", text[match.end() : match.end() + 8])
        if binary and depth == 0 and re.match(r"[\d)}\]%!.]", previous) and not scientific:
            begin = match.end()
        previous = token
    return text[begin:].strip()
