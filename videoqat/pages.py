"""Pages of results: templates filled from the JSON that commands wrote, so that no number on them is typed by hand."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def run_line(result: dict[str, Any], how: str) -> str:
    """One Markdown item: when, on what, how, with which versions, and by which command `result` was made. It holds a `provenance`."""
    about = result["provenance"]
    installed = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version != "not installed")
    commit = "" if about["commit"] == "unknown" else f"; commit `{about['commit']}`"
    return f"* {about['date']}, {about['device']}, {how}; {installed}{commit}:\n  `{about['command']}`"


def fill(template: str, names: dict[str, Any]) -> str:
    """`template` (jinja2) with `names`.

    Raises:
        jinja2.UndefinedError: the template asks for a name that isn't there.
    """
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, autoescape=False)
    return environment.from_string(template).render(names)


def print_page(module: str, about: str, render: Callable[[str, Iterable[dict[str, Any]]], str]) -> None:
    """The command line of a module that makes pages, `python -m MODULE TEMPLATE RESULT...`: `render(template, results)` to standard output.

    Args:
        module: its name.
        about: one line.
        render: makes the page of a template's text and what commands wrote with --json.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("template", type=Path, help="a page's template")
    parser.add_argument("results", type=Path, nargs="+", help="what the benchmark wrote with --json")
    arguments = parser.parse_args()
    print(render(arguments.template.read_text(), [json.loads(path.read_text()) for path in arguments.results]), end="")
