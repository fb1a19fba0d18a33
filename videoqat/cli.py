"""The command line: parse, load the configuration, call.

Exit codes: 0 done; 1 a fault of ours (with its traceback), or NaN and inf in a result, or another process of the run lost (one line each); 2 bad
input (one line says what and what is legal); 75 stopped by a signal after saving, to be started again; 130 interrupted. Under torchrun the lines
name their rank.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from videoqat import __version__
from videoqat.commands import COMMANDS, Command, execute
from videoqat.console import is_rank_zero, own_rank
from videoqat.errors import NonFiniteError, UserError, WorkerLost
from videoqat.files import writable_folder, write_json

EXIT_BAD_INPUT = 2
GROUPS = {  # commands of two words, by their first
    "bench": "timings: of attention, a forward, a video, training; `videoqat bench attention`",
    "evidence": "what 4-bit attention costs and what training wins back: `videoqat evidence judge`",
}


def _keys(schema: Any, prefix: str = "") -> list[str]:
    """`key=default` of every leaf of a configuration dataclass; `key=` where it must be given."""
    lines = []
    for field in dataclasses.fields(schema):
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = field.default
        if dataclasses.is_dataclass(default):
            lines += _keys(default, f"{prefix}{field.name}.")
        else:
            lines.append(f"{prefix}{field.name}={'' if default == '???' else json.dumps(default)}")
    return lines


def _add_command(subparsers: Any, name: str, command: Command) -> None:
    """Adds the parser of command `name` (`bench attention` is `attention` among the subparsers of `bench`)."""
    documentation = (command.schema.__doc__ or "").strip()
    keys = "\n".join(f"  {line}" for line in _keys(command.schema))
    parser = subparsers.add_parser(
        name.rpartition(" ")[2],
        help=command.help,
        description=f"{command.help[0].upper()}{command.help[1:]}.\n\n{documentation}",
        epilog=f"example:\n  {command.example}\n\nkeys and their defaults:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(name=name)
    if name == "compare":
        parser.add_argument("--attention-only", action="store_const", const="compare-attention", dest="name", help="the command compare-attention")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's")
    parser.add_argument("--config", metavar="FILE", help="a YAML file, or the name of one below configs/ (such as train/tiny)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON to FILE (- for standard output)")
    parser.add_argument("--dry-run", action="store_true", help="check everything and say what would be done; load no weights, write nothing")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `videoqat`."""
    parser = argparse.ArgumentParser(
        prog="videoqat",
        description="Train, prove and serve video diffusion models with 4-bit attention.",
        epilog="`videoqat COMMAND --help` shows an example and every setting. Start with `videoqat demo`.",
    )
    parser.add_argument("--version", action="version", version=f"videoqat {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    groups: dict[str, Any] = {}
    for name, command in COMMANDS.items():
        group, _, word = name.partition(" ")
        if word and group not in groups:
            groups[group] = subparsers.add_parser(group, help=GROUPS[group]).add_subparsers(required=True, metavar="WHAT")
        _add_command(groups[group] if word else subparsers, name, command)
    return parser


def _check_destination(destination: str | None) -> None:
    """Raises UserError if `--json` names what `_emit` can't write: to be known before hours of work, not after."""
    if destination in (None, "-"):
        return
    path = Path(destination)
    if not path.resolve().parent.is_dir():
        raise UserError(f"--json {destination}: its folder does not exist")
    if path.exists() and not path.is_file():
        raise UserError(f"--json {destination} is there and is no file; legal: a file's path, or - for standard output")
    writable_folder("--json", path.resolve().parent)


def _emit(result: dict[str, Any], destination: str | None) -> None:
    """The result to `destination` as JSON, or its plain values to standard output as `key: value` lines."""
    if not is_rank_zero():
        return
    if destination == "-":
        print(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))
        return
    if destination is not None:
        write_json(destination, result)
    for key, value in result.items():
        if isinstance(value, str | int | float):
            print(f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}")


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") or "=" not in word for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.overrides += rest  # argparse takes one run of settings; these stand behind an option that follows others
    who = f"videoqat {arguments.name}{own_rank()}"
    try:
        _check_destination(arguments.json)
        result = execute(arguments.name, arguments.config, arguments.overrides, dry_run=arguments.dry_run)
        _emit(result, arguments.json)
    except UserError as error:
        print(f"{who}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (NonFiniteError, WorkerLost) as error:
        print(f"{who}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{who}: interrupted", file=sys.stderr)
        return 130
    return int(result.get("exit_code", 0))
