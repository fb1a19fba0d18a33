"""The house keeps its own rules: imports, sizes, documents that tell the truth, commands in the README that run."""

import dataclasses
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from omegaconf import MISSING

from videoqat import __version__
from videoqat.cli import build_parser
from videoqat.commands import COMMANDS
from videoqat.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LONGEST = {"videoqat": 400, "app": 400, "tests": 500}  # lines


def sources(*suffixes: str) -> list[Path]:
    """Files of the project with one of `suffixes`, whether committed yet or not."""
    folders = ("videoqat", "app", "kernels", "launch", "tests", "configs", "docs", ".ci", ".github")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path for path in [*found, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"] if path.suffix in suffixes)


def shell_lines(document: Path) -> list[str]:
    """The commands in a document's ```sh blocks."""
    blocks = re.findall(r"^```(?:sh|console|bash)\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def words(line: str) -> list[str]:
    """A command's words, with the path that leads to the program cut off."""
    program, *rest = shlex.split(line, comments=True)
    return [program.removeprefix(".venv/bin/"), *rest]


# Imports


def test_imports_point_downwards():
    lint = subprocess.run([str(Path(sys.executable).parent / "lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_the_import_rule_sees_a_wrong_import(tmp_path: Path):
    """The same contract over a small package with the same floors, one import of which points upwards."""
    layers = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    package = tmp_path / "videoqat"
    package.mkdir()
    (package / "__init__.py").touch()
    for module in re.findall(r"\w+", " ".join(layers)):
        (package / f"{module}.py").touch()
    contract = (ROOT / "pyproject.toml").read_text().split("[tool.importlinter]")[1].split("[[tool.importlinter.contracts]]")
    contract[0] = contract[0].replace(', "videoqat_kernels", "app"', "")
    (tmp_path / "pyproject.toml").write_text("[tool.importlinter]" + "[[tool.importlinter.contracts]]".join(contract[:2]))
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]

    def lint() -> int:
        return subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, check=False).returncode

    assert lint() == 0
    (package / "attention.py").write_text("import videoqat.models\n")
    assert lint() == 1
    (package / "attention.py").write_text("")
    (package / "unplaced.py").touch()
    assert lint() == 1  # a new module must be given its place


@pytest.mark.parametrize("program", ["import videoqat", "from videoqat.cli import build_parser; build_parser()"])
def test_importing_the_program_is_light(program: str):
    """`videoqat --help` has to answer at once, so nothing heavy may be on the way to it."""
    heavy = ("torch", "deepspeed", "gradio", "fastapi", "sqlalchemy", "transformers", "diffusers", "matplotlib", "skimage", "tensorboard")
    heavy = (*heavy, "imageio", "av")
    script = f"{program}; import sys; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Sizes and words


@pytest.mark.parametrize("folder", LONGEST)
def test_modules_fit_in_the_head(folder: str):
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > LONGEST[folder]} == {}


def test_nothing_is_left_for_later():
    unfinished = re.compile("TO" + "DO|FIX" + "ME|X" + "XX")
    found = [str(path) for path in sources(".py", ".md", ".yaml", ".yml", ".toml", ".j2", ".svg", "") if unfinished.search(path.read_text())]
    assert found == []


# Documents


def prose(document: Path) -> str:
    """A document without its blocks of code, in which neither `#` begins a heading nor brackets are links."""
    return re.sub(r"^( *)```.*?^\1```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def heading_anchors(document: Path) -> set[str]:
    """As GitHub makes them: of two equal headings the second gets -1."""
    headings = re.findall(r"^#+ (.*)$", prose(document), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {f"{anchor}-{count}" if (count := plain[:place].count(anchor)) else anchor for place, anchor in enumerate(plain)}


def broken_links(document: Path) -> list[str]:
    """Relative links and pictures whose file, or heading in it, isn't there."""
    targets = re.findall(r"\]\(<?([^)>\s]*)[^)]*\)|^\[[^\]]+\]: (\S+)|(?:href|src)=\"([^\"]*)\"", prose(document), flags=re.MULTILINE)
    broken = []
    for target in ("".join(groups) for groups in targets):
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        outside = re.match(r"[a-z]+:", target)
        if not outside and (not path.exists() or (anchor and anchor not in heading_anchors(path))):
            broken.append(target)
    return broken


@pytest.mark.parametrize("document", sources(".md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path):
    assert broken_links(document) == []


def test_broken_links_are_seen(tmp_path: Path):
    (tmp_path / "other.md").write_text("# One\n## Two, *three*\n```sh\n# no heading\n```\n# One\n")
    page = tmp_path / "page.md"
    good = '[a](other.md) [b](other.md#two-three) [c](other.md#one-1 "twice") [d](#here) ![e](https://x.y/z.png)'
    page.write_text(f"# Here\n{good}\n```\n[g](none.md)\n```\n")
    assert broken_links(page) == []
    bad = ["none.md", "other.md#no-heading", "other.md#one-2", "#there", "none.png", "none.svg", "none.html"]
    page.write_text(
        f'# Here\n[a]({bad[0]}) [b]({bad[1]}) [c]({bad[2]} "twice") [d]({bad[3]}) [![e]({bad[4]})](other.md)\n<img src="{bad[5]}">\n\n[f]: {bad[6]}\n'
    )
    assert broken_links(page) == bad


def test_the_changelog_knows_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", text, flags=re.MULTILINE)


def test_the_architecture_page_shows_the_rule_that_is_enforced():
    page = (ROOT / "docs" / "architecture.md").read_text()
    ladder = re.search(r"## Who may import whom.*?```\n(.*?)```", page, flags=re.DOTALL)
    assert ladder
    shown = [set(re.findall(r"\w+", line)) for line in ladder[1].splitlines()]
    layers = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    assert shown == [set(re.findall(r"\w+", layer)) for layer in layers if layer != "__main__"]


def test_the_architecture_page_names_every_part_of_the_package():
    page = (ROOT / "docs" / "architecture.md").read_text()
    parts = [path.name + ("/" if path.is_dir() else "") for path in (ROOT / "videoqat").iterdir() if not path.name.startswith("__")]
    assert [part for part in parts if part not in page] == []


def leaves(schema: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> default of every setting of a configuration dataclass."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(default):
            found |= leaves(default, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = default
    return found


def test_the_training_page_documents_the_settings_that_exist():
    page = (ROOT / "docs" / "training.md").read_text()
    documented: dict[str, str] = {}
    for row in re.findall(r"^\| (`[a-z].*) \|$", page, flags=re.MULTILINE):
        keys, default = (cell.strip() for cell in row.split("|")[:2])
        names = re.findall(r"`([\w.]+)`", keys)
        group = names[0].rpartition(".")[0]
        full = [name if "." in name or not group else f"{group}.{name}" for name in names]
        documented |= dict(zip(full, (value.strip().strip("`") for value in default.split(",")), strict=True))
    settings = leaves(TrainConfig)
    assert documented.keys() <= settings.keys()
    unmentioned = [key for key in settings if not re.search(rf"`(\w+\.)*{key.rpartition('.')[2]}`", page)]
    assert unmentioned == ["runtime.dtype"]  # in training it is float32 or refused
    for key, told in documented.items():
        default = settings[key]
        if default == MISSING:
            assert told == "", key
        elif isinstance(default, bool):
            assert told == str(default).lower(), key
        elif isinstance(default, float):
            assert float(told) == default, key
        else:
            assert told == str(default), key


# Commands in the documents


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_are_commands(document: Path):
    """Each parses, and each `make` target exists. That the README's really run is tested in test_readme.py."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in shell_lines(document):
        program, *rest = words(line)
        if program == "torchrun":  # torchrun's own words, -m, and ours
            program, *rest = rest[rest.index("-m") + 1 :]
        if program.startswith("launch/"):  # a launcher's own words, --, and those of our training
            assert (ROOT / program).is_file(), line
            program, rest = "videoqat", ["train", *rest[rest.index("--") + 1 :]]
        if program == "make":
            assert set(rest) <= targets, line
        elif program == "videoqat":
            arguments = build_parser().parse_args([word for word in rest if word != "..."])
            assert arguments.name in COMMANDS, line
        else:
            assert program in ("python", "pre-commit", "echo", "tensorboard"), line


def test_every_command_shows_an_example_that_parses():
    for name, command in COMMANDS.items():
        program, *rest = shlex.split(command.example)
        assert program == "videoqat"
        assert build_parser().parse_args(rest).name == name


def test_ci_runs_what_the_readme_names():
    readme = (ROOT / "README.md").read_text()
    assert "make test" in readme
    assert [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")] == ["make check", "make test"]
