"""Rules for every file that a program can check, one test a rule; `make check` runs them after ruff, pyright and
import-linter. A failing test lists the offending places."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import grimp
import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent
SOURCE = sorted((ROOT / "src").rglob("*.py"))
MODULES = SOURCE + [
    file for folder in ("tests", "benchmarks", "examples", "tools") for file in sorted((ROOT / folder).rglob("*.py"))
]
TEXTS = [
    file
    for pattern in (
        "*.md",
        "*.toml",
        "*.yml",
        "*.txt",
        "Makefile",
        ".ci/*",
        "docs/**/*",
        "examples/**/*",
        "benchmarks/**/*",
    )
    for file in sorted(ROOT.glob(pattern))
    if file.is_file() and file.suffix in ("", ".md", ".toml", ".yml", ".yaml", ".txt", ".json", ".jsonl")
]

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 15
MAX_TEST_NAME = 60
MAX_PROCESS_WORDS = 18
FOREIGN_WORDS = re.compile("(episode|experience|explorer|manager|handler|helper|util)s?")
# Words with no meaning in the field; names and prose use the standard term (docs/glossary.md).
PRIVATE_WORDS = frozenset(
    re.findall(
        r"\w+",
        """slope slopes steep chances spread told tell heard asked asks crowd becoming honoured behind aftermath remains
        suspects turnstile chronicle aside bend deck lane lesson lessons tries supply bell anew afresh seat seats keeper
        keepers entrance entrances""",
    )
)
VAGUE_NAMES = frozenset(("one", "found", "asked", "told", "given", "known", "kept", "mine", "both", "what"))
# Jobs with one mechanism each: what its code contains, and the modules that may contain it.
MECHANISMS = {
    "create_subprocess_exec": ("engine/vllm/server.py", "processes/start.py"),
    "subprocess.Popen(": ("processes/start.py",),
    "ProcessPoolExecutor": (),
    "multiprocessing": (),
    "os.fork(": ("engine/vllm/guard.py", "processes/confine.py", "processes/fork_server.py"),
    ".getppid()": ("engine/vllm/guard.py", "processes/parent.py"),  # the guard runs under vLLM's Python
    "prctl(": ("processes/parent.py",),
    "2 * delay": ("engine/processes/supervisor.py",),
    "pickle.dumps(": ("engine/adapters/cache.py", "processes/messages.py"),
    "spec_from_file_location(": ("imports.py",),
    "get_close_matches(": ("settings.py",),
    "entry_points(": ("entry_points.py",),
    "os.fsync(": ("atomic.py", "service/storage/payload_files.py"),
}
# Thousands of lines of source. Whoever needs more raises the number, and says in the commit what it is for.
LINES = {"engine": 38, "service": 18, "rl": 33, "integrations": 14, "dashboard": 2, "other": 13}
# Documented by Python and SQLAlchemy in spite of their names.
DOCUMENTED = frozenset(("_exit", "_asdict", "_current_frames", "_mapping"))
# Put together from pieces, so that this file does not hold them.
UNWANTED = (
    "pypi" + ".org",
    "python" + "hosted",
    "/opt/" + "pypi",
    "/work/" + "shared",
    "../" + "shared",
    "." + "library/",
)


def test_modules_have_docstrings() -> None:
    # An empty __init__.py needs none.
    assert [_name(file) for file in MODULES if file.read_text().strip() and not ast.get_docstring(_tree(file))] == []


def test_files_are_short() -> None:
    assert [_name(file) for file in MODULES if len(file.read_text().splitlines()) > MAX_FILE_LINES] == []


def test_functions_are_short() -> None:
    assert [
        f"{_name(file)}:{node.lineno} {node.name}"
        for file in MODULES
        for node in _functions(file)
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ] == []


def test_folders_are_small() -> None:
    sizes = Counter(file.parent for file in MODULES if file.name != "__init__.py")
    assert {_name(folder): size for folder, size in sizes.items() if size > MAX_FOLDER_FILES} == {}


def test_no_import_circles() -> None:
    graph = grimp.build_graph("tinsmith", exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while leaves := {module for module, targets in imports.items() if not targets & imports.keys()}:
        imports = {module: targets for module, targets in imports.items() if module not in leaves}
    assert sorted(imports) == []  # modules of a circle, and those that import one


def test_http_errors_are_made_in_one_module() -> None:
    assert [_name(file) for file in SOURCE if "HTTPException" in file.read_text() and file.name != "app.py"] == []


def test_mechanisms_are_in_their_modules() -> None:
    package = ROOT / "src" / "tinsmith"
    files = sorted(package.rglob("*.py"))
    places = {
        text: tuple(str(file.relative_to(package)) for file in files if text in file.read_text()) for text in MECHANISMS
    }
    assert places == MECHANISMS


def test_source_stays_within_its_lines() -> None:
    lines = dict.fromkeys(LINES, 0)
    for file in SOURCE:
        wing = file.relative_to(ROOT / "src" / "tinsmith").parts[0]
        lines[wing if wing in LINES else "other"] += len(file.read_text().splitlines())
    assert {wing: count for wing, count in lines.items() if count > 1000 * LINES[wing]} == {}


def test_words_for_processes_are_few_and_explained() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| \*\*.+", page.partition("\n## Processes\n")[2].partition("\n## ")[0], re.MULTILINE)
    assert len(rows) <= MAX_PROCESS_WORDS
    explained = sorted(name for row in rows for name in re.findall("`([A-Z]\\w+)`", row))
    package = ROOT / "src" / "tinsmith"
    files = [*package.glob("processes/*.py"), *package.glob("engine/processes/*.py"), package / "engine/process_end.py"]
    files.append(package / "engine/cluster/replica.py")
    classes = (node.name for file in files for node in _tree(file).body if isinstance(node, ast.ClassDef))
    assert sorted(name for name in classes if not name.startswith("_")) == explained


def test_attributes_are_not_probed() -> None:
    calls = (
        (file, node)
        for file in SOURCE
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    assert [
        f"{_name(file)}:{call.lineno}"
        for file, call in calls
        if call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) == 3)  # type: ignore[attr-defined]
    ] == []


def test_private_interfaces_of_others_are_listed() -> None:
    page = (ROOT / "docs" / "code" / "private-interfaces.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    rows = [[re.findall("`(.+?)`", cell) for cell in line.split("|")[1:-1]] for line in lines]
    listed = {(names[0].rpartition(".")[2], file) for names, files, _, _ in rows for file in files}
    package = ROOT / "src" / "tinsmith"
    used = {(name, str(file.relative_to(package))) for file in SOURCE for name in _private_uses(file)}
    assert sorted(used - listed) == []
    assert sorted(place for place in listed if place[0] not in (package / place[1]).read_text()) == []
    guards = [test.split("::") for _, _, _, tests in rows for test in tests]
    assert [test for file, test in guards if f"def {test}(" not in (ROOT / file).read_text()] == []
    assert all(len(row[3]) == 1 for row in rows)


def test_words_of_other_systems_stay_in_integrations() -> None:
    files = [file for file in SOURCE if "integrations" not in file.parts]
    names = {(_name(file), word) for file in files for name in _own_names(file) for word in _words(name)}
    prose = {(_name(file), word) for file in files for text in _comments(file) for word in _words(text)}
    assert sorted(place for place in names | prose if FOREIGN_WORDS.fullmatch(place[1])) == []


def test_identifiers_use_no_private_words() -> None:
    # Keys of other systems keep their names.
    files = [file for file in MODULES if not (file.name.startswith("schema") and "integrations" in file.parts)]
    names = {(_name(file), name) for file in files for name in _own_names(file)}
    assert sorted(place for place in names if PRIVATE_WORDS & set(_words(place[1]))) == []


def test_identifiers_are_not_vague() -> None:
    names = {(_name(file), name) for file in MODULES for name in _own_names(file)}
    assert sorted(place for place in names if place[1].strip("_") in VAGUE_NAMES) == []


def test_prose_uses_no_private_words() -> None:
    # Prompts of other systems keep their words.
    files = [file for file in MODULES if file != Path(__file__) and file.name != "prompts.py"]
    prose = ((file, text) for file in files for text in _prose(file))
    documents = (
        (file, re.sub(r"`[^`]*`", "", file.read_text()))  # without names in code
        for file in TEXTS
        if file.suffix not in (".json", ".jsonl") and not file.name.startswith("constraints")
    )
    places = ((_name(file), PRIVATE_WORDS & set(_words(text))) for file, text in [*prose, *documents])
    assert sorted((place, *words) for place, words in places if words) == []


def test_public_classes_have_one_meaning_in_a_wing() -> None:
    places = defaultdict(list)
    for file in SOURCE:
        parts = file.relative_to(ROOT / "src" / "tinsmith").parts
        wing = parts[:2] if parts[0] == "integrations" else parts[:1]
        for node in _tree(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[wing, node.name].append(_name(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_names_of_tests_are_short() -> None:
    tests = ((file, node.name) for file in MODULES if file.name.startswith("test_") for node in _functions(file))
    assert [
        f"{_name(file)} {name}" for file, name in tests if name.startswith("test_") and len(name) > MAX_TEST_NAME
    ] == []


def test_files_name_no_registry_and_no_outside_folder() -> None:
    files = {*MODULES, *TEXTS}
    assert sorted(_name(file) for file in files if any(text in file.read_text() for text in UNWANTED)) == []


def test_every_setting_is_read() -> None:
    read = {
        node.attr
        for file in SOURCE
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert {f"{kind}.{name}" for kind, names in _settings().items() for name in names if name not in read} == set()


def test_license_is_apache() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_constraints_are_exact() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert len(lines) > 50
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@cache
def _tree(file: Path) -> ast.Module:
    for _ in range(5):
        with suppress(SystemError):  # Python 3.11 fails if another thread builds a tree meanwhile
            return ast.parse(file.read_text())
    return ast.parse(file.read_text())


def _functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(_tree(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _private_uses(file: Path) -> Iterator[str]:
    """Names with an underscore that a module reads or imports and does not define: of another package or module."""
    nodes = list(ast.walk(_tree(file)))
    private = re.compile("_[a-z]")
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    for node in nodes:
        match node:
            case ast.Attribute(attr=name):
                names = [name]
            case ast.Call(func=function, args=arguments) if ast.unparse(function).startswith(("getattr", "vars(")):
                names = [str(each.value) for each in arguments if isinstance(each, ast.Constant)]
            case ast.Subscript(value=value, slice=ast.Constant(value=key)) if ast.unparse(value).startswith("vars("):
                names = [str(key)]
            case ast.ImportFrom(module=str(module)) if not module.startswith(("tinsmith", "__future__")):
                is_private = any(private.match(part) or "internal" in part for part in module.split("."))
                yield from (each.name for each in node.names if is_private or private.match(each.name))
                continue
            case _:
                continue
        yield from (name for name in names if private.match(name) and name not in own | DOCUMENTED)


def _settings() -> dict[str, list[str]]:
    """Fields of each settings class."""
    fields = {}
    kinds = {"Settings"}
    classes = [node for file in SOURCE for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # a settings class may derive from another
        for node in classes:
            if any(isinstance(base, ast.Name) and base.id in kinds for base in node.bases):
                kinds.add(node.name)
                fields[node.name] = [
                    line.target.id
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                ]
    return fields


@cache
def _own_names(file: Path) -> tuple[str, ...]:
    """Names that a file defines: its own, of classes, functions, parameters, variables and attributes."""

    def names() -> Iterable[str]:
        yield file.stem
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
            elif isinstance(node, ast.arg):
                yield node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr

    return tuple(dict.fromkeys(names()))


def _words(text: str) -> list[str]:
    """Lower-case words of a text or an identifier: `RewardHelper` and `reward_helper` -> reward, helper."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)]


@cache
def _comments(file: Path) -> tuple[str, ...]:
    """Comments and docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    with file.open("rb") as lines:
        comments = [token.string for token in tokenize.tokenize(lines.readline) if token.type == tokenize.COMMENT]
    return (*comments, *(ast.get_docstring(node) or "" for node in ast.walk(_tree(file)) if isinstance(node, kinds)))


def _prose(file: Path) -> tuple[str, ...]:
    """Comments and every string literal of several words; one without a space is a name, perhaps of a file format."""
    nodes = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Constant))
    return (*_comments(file), *(node.value for node in nodes if isinstance(node.value, str) and " " in node.value))
