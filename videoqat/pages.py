"""Pages of results: templates filled from the JSON that commands wrote, so that no number on them is typed by hand."""

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
