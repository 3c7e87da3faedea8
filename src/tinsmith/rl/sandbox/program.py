"""The first code in a sandbox: reads a program from standard input and executes it. Imports the standard library only.

`execution` sends the text of this file to the Python of the sandbox. It marks the beginning and, if the program reaches
its end, the end in standard error, by a text that the program is not given.
"""

import ast
import json
import linecache
import os
import sys
import traceback
import types


def main() -> None:
    """Read the program, of which the rest of standard input is the input, and execute it as __main__."""
    job = json.loads(_read(int(_read(12))))
    marks = os.dup(2)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    os.write(marks, job["mark"].encode())
    try:
        for name, source in job["parts"]:
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            _execute(name, source, vars(module), show_value=job["show_value"])
        sys.stdout.flush()
    except Exception as error:  # noqa: BLE001 - shown to whoever wrote the program
        frames = error.__traceback__
        for _ in ("main", "_execute"):
            frames = frames and frames.tb_next
        sys.stderr.write("".join(traceback.format_exception(type(error), error, frames)))
        sys.exit(1)
    os.write(marks, job["mark"].encode())


def _execute(name: str, source: str, scope: dict, *, show_value: bool) -> None:
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not (show_value and isinstance(last, ast.Expr)):
        exec(compile(tree, name, "exec"), scope)
        return
    exec(compile(ast.Module(tree.body[:-1], []), name, "exec"), scope)
    value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
    if value is not None:
        print(repr(value))  # noqa: T201 - the output of the program


def _read(size: int) -> bytes:
    """So many bytes of standard input, and no more: the rest is for the program."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            sys.exit(3)
        data += more
    return data


if __name__ == "__main__":
    main()
