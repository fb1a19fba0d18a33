"""The figures of the evidence's page, as SVG files.

    python -m videoqat.evaluation.evidence_figures FOLDER TABLE...

Tables are given as to `evidence_table`. Of main, options and ablations, evidence-NAME.svg: what is left of the cost of 4 bits in every row. Of
where, evidence-share.svg: what 4 bits cost, by how much of attention is computed in them. Of ablations, evidence-gradients.svg: gradient norms of its
trainings, before those of Attn-QAT.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videoqat.console import say
from videoqat.errors import UserError
from videoqat.evaluation import charts
from videoqat.evaluation.evidence_table import read_tables, summarise
from videoqat.files import atomic_path, writable_folder

GAPS = ("main", "options", "ablations")
BEHIND = "qat"  # the training of configs/evidence/ablations.yaml that the others are held against


def draw(files: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Name of a file -> SVG, of those tables that are there (name -> what `evidence run` gathered).

    Raises:
        UserError: a table lacks one of its first two rows, BF16 and plain 4 bits, which the figures show all others beside.
    """
    tables = {name: summarise(files[name]) for name in (*GAPS, "where") if name in files}
    for name, rows in tables.items():
        first = [row["name"] for row in files[name]["config"]["rows"][:2]]
        if [row["name"] for row in rows[:2] if row["loss"]] != first:
            raise UserError(f"{name} has no losses of {' and '.join(first)} yet, beside which its figure shows all others")
    figures = {f"evidence-{name}.svg": charts.as_file(charts.gaps(rows)) for name, rows in tables.items() if name in GAPS}
    if "where" in tables:
        figures["evidence-share.svg"] = charts.as_file(charts.four_bit_share(tables["where"]))
    trainings = files["ablations"]["trainings"] if "ablations" in files else []
    if any(one["grad_norm"] and one["name"] != BEHIND for one in trainings):
        figures["evidence-gradients.svg"] = charts.as_file(charts.gradient_norms(trainings, BEHIND))
    elif "ablations" in files:
        say(f"evidence-gradients.svg is left out: ablations has no gradient norms of a training beside {BEHIND}")
    return figures


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m videoqat.evaluation.evidence_figures", description="The figures of the evidence's page.")
    parser.add_argument("folder", type=Path, help="where they are written")
    parser.add_argument("tables", type=Path, nargs="+", help="main, options, ablations, where; others have no figure")
    arguments = parser.parse_args()
    try:
        figures = draw(read_tables(arguments.tables))
    except UserError as error:
        parser.exit(2, f"{error}\n")
    for name, svg in figures.items():
        with atomic_path(writable_folder("folder", arguments.folder) / name) as aside:
            aside.write_text(svg + "\n")
        print(arguments.folder / name)


if __name__ == "__main__":
    main()
