"""The evidence's page: numbers worked out from rows, words that follow from them, figures, the picture; and where 4 bits cost, in small."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.evidence import in_this_process
from PIL import Image

from videoqat.commands import execute
from videoqat.config import EvidenceConfig, ExampleModelConfig, load
from videoqat.data.video_io import read_video, write_video
from videoqat.errors import ConfigError, DataError, UserError
from videoqat.evaluation import charts, evidence_figures, evidence_picture
from videoqat.evaluation.evidence_picture import picture, save
from videoqat.evaluation.evidence_run import plan, run
from videoqat.evaluation.evidence_table import TABLES, interval, read_tables, render, summarise
from videoqat.evaluation.evidence_words import aim, claim, compared
from videoqat.models.tiny import build_pipeline

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = (ROOT / "docs" / "evidence.md.j2").read_text()
PROVENANCE = {"date": "", "device": "", "versions": {}, "commit": "unknown", "command": ""}


# Numbers


def _row(name: str, seed: int, losses: list[float]) -> dict:
    video = {"fidelity": {"psnr_mean": 20.0 + seed, "ssim_mean": 0.5}, "flicker": 1.0}
    real = {"videos": 400, "garment": {"share": 0.9, "interval": [0.8, 0.95]}, "direction": {"share": 1.0, "interval": [0.99, 1.0]}}
    judged = {"videos": 4, "garment": {"right": 3}, "direction": {"right": 4 - seed}, "real_clips": real}
    what = {"training": "", "recipe": {"name": "bf16"}, "four_bit_share": 0.5, "videos": [video], "judged": judged}
    return {"name": name, "seed": seed, "clip_losses": losses, **what}


def _asked(*names: str) -> list[dict]:
    return [{"name": name, "training": "", "reference": "", "plain": "", "keep": 0, "videos": True} for name in names]


def test_what_is_won_back_is_worked_out_seed_by_seed() -> None:
    """Two seeds whose references differ by far more than the gaps."""
    names = _asked("BF16", "NVFP4", "QAT", "missing")
    rows = [_row(n, 0, [1.0 + d, 2.0 + d]) for n, d in (("BF16", 0.0), ("NVFP4", 0.1), ("QAT", 0.02))]
    rows += [_row(n, 1, [5.0 + d, 7.0 + d]) for n, d in (("BF16", 0.0), ("NVFP4", 0.2), ("QAT", 0.1))]
    bf16, nvfp4, qat = summarise({"config": {"rows": names, "reference": "", "plain": "", "seeds": [0, 1]}, "rows": rows})
    assert (bf16["gap"]["mean"], bf16["recovered"], nvfp4["recovered"]) == (0.0, None, None)
    assert nvfp4["gap"]["mean"] == pytest.approx(0.15)
    assert qat["recovered"]["low"] == pytest.approx(0.5)
    assert qat["recovered"]["high"] == pytest.approx(0.8)
    assert qat["recovered"]["mean"] == pytest.approx(0.65)
    assert qat["gap"]["sd"] == pytest.approx(0.08 / math.sqrt(2))
    assert qat["direction"]["share"] == 7 / 8
    assert qat["psnr"] == 20.5
    assert qat["ci95"] == pytest.approx([0.06 - 12.706 * 0.04, 0.06 + 12.706 * 0.04])  # two seeds, 0.02 and 0.1, and clips that differ alike
    left = 0.06 / 0.15  # of the mean gap; the seeds stand 0.02 - 0.1 left and 0.1 - 0.2 left around it, and the clips alike
    half = 12.706 * np.std([0.02 - 0.1 * left, 0.1 - 0.2 * left], ddof=1) / 0.15 / math.sqrt(2)
    assert qat["recovered_ci95"] == pytest.approx([1 - left - half, 1 - left + half])


def test_the_base_stands_for_every_seed() -> None:
    """Without videos it is measured once; trainings of other seeds are held against it all the same."""
    names = _asked("BF16", "NVFP4", "QAT")
    rows = [_row("BF16", 0, [1.0, 2.0]), _row("NVFP4", 0, [1.1, 2.1])]
    rows += [{**_row("QAT", seed, [1.0 + gap, 2.0 + gap]), "training": "qat"} for seed, gap in enumerate((0.01, 0.03, 0.05))]
    bf16, nvfp4, qat = summarise({"config": {"rows": names, "reference": "", "plain": "", "seeds": [0, 1, 2]}, "rows": rows})
    assert (bf16["seeds"], nvfp4["seeds"], nvfp4["videos"], qat["seeds"]) == ([0], [0], 1, [0, 1, 2])
    assert qat["gap"]["mean"] == pytest.approx(0.03)
    assert [qat["recovered"][key] for key in ("mean", "low", "high")] == pytest.approx([0.7, 0.5, 0.9])


def test_without_4_bits_nothing_is_won_back() -> None:
    """Weights of Attn-QAT run in BF16, or attention in 8 bits: near BF16's loss, since they don't pay for 4 bits."""
    rows = [_row("BF16", 0, [1.0, 2.0]), _row("NVFP4", 0, [1.1, 2.1]), {**_row("QAT in BF16", 0, [1.01, 2.01]), "four_bit_share": 0.0}]
    one = {"config": {"rows": _asked("BF16", "NVFP4", "QAT in BF16"), "reference": "", "plain": "", "seeds": [0]}, "rows": rows}
    assert [row["recovered"] for row in summarise(one)] == [None] * 3


def test_videos_are_held_against_those_of_the_same_caption() -> None:
    """PSNR against that of plain 4 bits, flicker against BF16's; what is identical has no PSNR, and so no difference."""
    names, rows = _asked("BF16", "NVFP4", "QAT"), []
    for name, psnr, flicker in (("BF16", None, (1.0, 2.0)), ("NVFP4", (20.0, 30.0), (1.5, 2.0)), ("QAT", (21.0, 33.0), (0.5, 2.5))):
        videos = [{"fidelity": {"psnr_mean": psnr and psnr[at], "ssim_mean": 1.0}, "flicker": flicker[at]} for at in (0, 1)]
        rows.append({**_row(name, 0, [1.0, 2.0]), "videos": videos})
    bf16, nvfp4, qat = summarise({"config": {"rows": names, "reference": "", "plain": "", "seeds": [0]}, "rows": rows})
    assert (bf16["psnr_above"], nvfp4["psnr_above"], bf16["flicker_above"]) == (None, None, None)
    assert qat["psnr_above"]["mean"] == pytest.approx(2.0)  # 1 and 3
    assert qat["psnr_above"]["ci95"] == pytest.approx([2.0 - 1.96, 2.0 + 1.96])
    assert nvfp4["flicker_above"]["mean"] == pytest.approx(0.25)
    assert qat["flicker_above"]["mean"] == pytest.approx(0.0)


def test_a_row_can_be_held_against_another_tables_pair() -> None:
    main = {"config": {"rows": _asked("BF16", "NVFP4"), "reference": "", "plain": "", "seeds": [0, 1]}, "trainings": [], "provenance": PROVENANCE}
    main["rows"] = [_row("BF16", 0, [1.0, 2.0]), _row("NVFP4", 0, [1.4, 2.4])]  # of the base: one seed stands for all
    names = {"rows": _asked("own BF16", "own NVFP4", "QAT"), "reference": "", "plain": "", "prompts": "", "seeds": [0, 1]}
    rows = [
        {**_row(name, seed, [1.0 + gap, 2.0 + gap]), "training": "t"}
        for seed in (0, 1)
        for name, gap in (("own BF16", 0.1), ("own NVFP4", 0.5), ("QAT", 0.3))
    ]
    options = {"config": names, "rows": rows, "trainings": [], "provenance": PROVENANCE}
    again = render("{{ losses('options', 'own NVFP4', 'QAT') }}", {"options": options})  # every row, held against another of the same table
    assert "| own NVFP4 | -0.40000" in again
    assert "| own NVFP4 | -0.20000" in again
    template = "{{ '%.2f' % row('QAT', 'options').recovered.mean }} {{ '%.2f' % recovered('QAT', 'BF16', 'NVFP4', 'options').recovered.mean }}"
    assert render(template, {"main": main, "options": options}) == "0.50 0.25"
    with pytest.raises(KeyError, match="not all were measured"):
        render("{{ recovered('QAT', 'BF16', 'absent', 'options') }}", {"main": main, "options": options})


def test_one_clip_gives_no_interval() -> None:
    names = _asked("BF16", "NVFP4")
    one = {
        "config": {"rows": names, "reference": "", "plain": "", "prompts": "", "seeds": [0]},
        "rows": [_row("BF16", 0, [1.0]), _row("NVFP4", 0, [1.1])],
    }
    assert [row["ci95"] for row in summarise(one)] == [None, None]
    assert "| 1.10000 | BF16 | +0.10000 | +10.00% |  |  |" in render(
        "{{ losses('main') }}", {"main": {**one, "trainings": [], "provenance": PROVENANCE}}
    )


def test_intervals_count_clips_and_seeds() -> None:
    """One seed: the standard error over clips. Several: Student's t of the seeds' means, too, added in squares; clips are the same for every seed."""
    one_SC = np.array([[0.0, 1.0, 2.0, 3.0]])
    half = 1.96 * np.std(one_SC[0], ddof=1) / 2
    assert interval(one_SC) == pytest.approx([1.5 - half, 1.5 + half])
    three_SC = one_SC + np.array([[0.0], [1.0], [2.0]])
    assert interval(three_SC) == pytest.approx([2.5 - math.hypot(half, 4.303 / 3**0.5), 2.5 + math.hypot(half, 4.303 / 3**0.5)])
    assert interval(np.zeros((3, 1))) is None


def test_steps_have_no_loss_but_videos() -> None:
    names = _asked("BF16", "NVFP4", "first steps kept")
    rows = [_row("BF16", 0, [1.0, 2.0]), _row("NVFP4", 0, [1.1, 2.2]), {**_row("first steps kept", 0, []), "clip_losses": None}]
    one = {
        "config": {"rows": names, "reference": "", "plain": "", "prompts": "", "seeds": [0]},
        "rows": rows,
        "trainings": [],
        "provenance": PROVENANCE,
    }
    kept = summarise(one)[2]
    assert (kept["loss"], kept["gap"], kept["ci95"], kept["recovered"], kept["psnr"]) == (None, None, None, None, 20.0)
    assert "first steps" not in render("{{ losses('main') }}", {"main": one})
    assert "| first steps kept | 50% |  |  |  |  | 20.00 |" in render("{{ shares('main') }}", {"main": one})
    assert "| first steps kept | 1 | 20.00 |" in render("{{ videos('main') }}", {"main": one})
    assert "| *real clips, by the same judges* | 400 |" in render("{{ videos('main') }}", {"main": one})


# Words


def test_an_aim_is_met_or_not_by_its_number() -> None:
    assert aim("Won back", 0.92, 0.9, 0.91, 0.93) == "Won back, at least 90%: 92.0% (91.0% to 93.0%). **Met**."
    assert aim("Won back", 0.92, 0.9, 0.88, 0.93).endswith("**Met**, but not by the lower bound.")
    assert aim("Won back", 0.85, 0.9, 0.8, 0.88).endswith("(80.0% to 88.0%). **Not met**.")
    assert aim("Won back", 0.85, 0.9, 0.8, 0.92).endswith("**Not met**, though within reach of the bounds.")


def test_a_claim_agrees_or_not_by_its_numbers() -> None:
    assert compared([2.0, 3.0], [1.0, 2.0]) == "higher"
    assert compared([0.0, 1.0], [1.0, 2.0]) == "lower"
    assert compared([2.0, 1.0], [1.0, 2.0]) == "not told apart"
    assert compared([2.0], [1.0]) == "not told apart"
    losses = {"QAT": [1.0, 2.0], "other": [1.1, 2.2]}
    rows = [{"name": name, "seed": seed, "clip_losses": [loss]} for name, both in losses.items() for seed, loss in enumerate(both)]
    norms = {"qat": [[1, 1, 9], [1, 1, 9]], "o": [[2, 2, 2], [2, 2, 2]]}
    one = {"rows": rows, "trainings": [{"name": name, "seed": s, "grad_norm": norm} for name, both in norms.items() for s, norm in enumerate(both)]}
    mine, other = {"name": "other", "training": "o", "seeds": [0, 1]}, {"name": "QAT", "training": "qat", "seeds": [0, 1]}
    assert claim(one, mine, other, "loss") == "loss 1.65000 against 1.50000 of QAT: higher in 2 seeds"
    assert claim(one, mine, other, "loss", "not lower").endswith("the paper: not lower. **Agrees**")
    assert claim(one, other, mine, "loss", "not lower").endswith("the paper: not lower. **Contradicts the paper**")
    assert claim(one, mine, other, "median gradient norm", "higher").startswith("median gradient norm 2.000 against 1.000 of QAT: higher in 2 seeds")
    assert claim(one, mine, other, "largest gradient norm", "higher").endswith("lower in 2 seeds; the paper: higher. **Contradicts the paper**")
    single = {**mine, "seeds": [0]}
    assert claim(one, single, other, "loss", "higher").endswith("of a single seed, which tells nothing apart; the paper: higher. **Not seen here**")
    assert claim(one, {**other, "seeds": [0]}, mine, "loss", "not lower").endswith("the paper: not lower. **Not seen here**")  # it was lower
    with pytest.raises(KeyError, match="legal: loss"):
        claim(one, mine, other, "gradient")


# The page


def measured(name: str) -> dict[str, Any]:
    """As if `evidence run` had measured the shipped table `name`: numbers of no meaning, different for every row and seed."""
    shared = yaml.safe_load((ROOT / "configs" / "evidence" / "main.yaml").read_text())
    config = {**shared, **yaml.safe_load((ROOT / "configs" / "evidence" / f"{name}.yaml").read_text())}
    config["rows"] = [{"training": "", "reference": "", "plain": "", "keep": 0, "videos": True, **row} for row in config["rows"]]
    config["prompts"] = "captions.txt"
    rng = np.random.default_rng(0)
    rows = []
    for row in config["rows"]:
        for seed in config["seeds"]:
            cost = 0.0 if row["recipe"] == "bf16" else 0.1
            one = _row(row["name"], seed, (1 + cost + 0.01 * rng.random(4)).tolist())
            share = 0.0 if row["recipe"] == "bf16" else 1 - row["keep"] / 6
            rows.append({**one, "training": row["training"], "recipe": {"name": row["recipe"]}, "four_bit_share": share})
    trainings = [{"lr": 1e-4, **one, "seed": seed, "grad_norm": [0.1, 0.2, 0.3]} for one in config["trainings"] for seed in config["seeds"]]
    return {"config": config, "rows": rows, "trainings": trainings, "provenance": PROVENANCE}


def test_the_page_needs_the_main_table_alone_and_names_what_is_missing() -> None:
    page = render(TEMPLATE, {"main": measured("main")})
    assert "**Not met**" in page or "**Met**" in page
    for name in ("ablations", "options", "more", "where", "tuning"):
        assert f"Not measured yet: `videoqat evidence run --config evidence/{name}` will." in page
    assert "Not measured yet: `videoqat sensitivity` will." in page
    assert "evidence-share.svg)" not in page
    assert "the paper:" not in page


def test_the_page_asks_for_rows_that_the_shipped_tables_have() -> None:
    files = {name: measured(name) for name in ("main", "ablations", "options", "more", "where", "tuning")}
    part = {"relative_error": 0.1, "loss_change": 0.01}
    files["sensitivity"] = {"layers": [{"index": 0, "rank": 1, "only": part, "without": part}], "provenance": PROVENANCE}
    page = render(TEMPLATE, files)
    assert "Not measured yet" not in page
    assert page.count("the paper:") == 4
    assert "| worst 2 kept | 67% |" in page
    assert "| recipe/attn_qat_search_rotated_smooth, keep_layers [3] |" in page
    figures = evidence_figures.draw(files)
    assert set(figures) == {f"evidence-{name}.svg" for name in ("main", "options", "ablations", "share", "gradients")}
    for name, svg in figures.items():
        assert f"images/{name})" in page
        assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "QK only" in figures["evidence-share.svg"]
    assert "no-o-hp" in figures["evidence-gradients.svg"]
    assert "Attn-QAT 500" in figures["evidence-main.svg"]
    assert "BF16 500" not in figures["evidence-main.svg"]  # what others are held against has no gap
    assert evidence_figures.draw({"tuning": files["tuning"]}) == {}


def test_figures_need_bf16_and_plain_4_bits() -> None:
    whole = measured("main")
    for lacking in ("BF16", "NVFP4"):
        with pytest.raises(UserError, match="main has no losses of BF16 and NVFP4 yet"):
            evidence_figures.draw({"main": {**whole, "rows": [row for row in whole["rows"] if row["name"] != lacking]}})


def test_what_is_worse_by_far_stands_at_the_edge() -> None:
    """Of plain 4 bits' gap the axis shows a little more: a row of thirty times that would press all others together."""
    rows = summarise(measured("main"))
    far = {**rows[-1], "name": "far", "relative": {"mean": 3.0}, "gap": {"mean": 3.0}, "loss": {"mean": 4.0}, "ci95": [2.9, 3.1]}
    svg = charts.gaps([*rows, far])
    assert "+3e+02 %" in svg
    assert "300" not in re.findall(r"<text[^>]*>(.*?)</text>", svg)  # no such tick


def test_the_page_names_the_rows_that_a_table_lacks() -> None:
    whole = measured("main")
    lacking = [row for row in whole["rows"] if row["name"] != "MXFP4" and (row["name"], row["seed"]) != ("SageAttention3", 1)]
    once = [row for row in lacking if row["name"] != "base NVFP4" or row["seed"] == 0]  # of the base, without videos, one seed is all
    page = render("{{ losses('main') }}", {"main": {**whole, "rows": once}})
    assert page.endswith("Not measured yet: SageAttention3 (2 of 3 seeds), MXFP4.")
    assert "Not measured yet" not in render("{{ losses('main') }}", {"main": whole})


MEASURED = [path for path in sorted((ROOT / "docs" / "evidence").glob("*.json")) if path.stem in (*TABLES, "sensitivity")]


def test_the_published_page_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    assert render(TEMPLATE, read_tables(MEASURED)) == page
    images = re.findall(r"\]\((images/[^)]*)\)", page)
    assert len(images) >= 3
    assert [name for name in images if not (ROOT / "docs" / name).is_file()] == []


def test_the_readmes_numbers_are_those_of_the_page() -> None:
    tables = {name: {row["name"]: row for row in summarise(one)} for name, one in read_tables(MEASURED).items() if name != "sensitivity"}
    main, options = tables["main"], tables["options"]
    told = " ".join((ROOT / "README.md").read_text().split())
    won = {
        name: f"{100 * row['recovered']['mean']:.0f} %" for row in (*main.values(), *options.values()) if row["recovered"] for name in [row["name"]]
    }
    for words in (
        f"NVFP4 raises that model's loss by {100 * main['NVFP4']['relative']['mean']:.1f} %",
        f"2,000 steps of Attn-QAT win {won['Attn-QAT 2000']} of that back; searched scales alone win {won['NVFP4 searched']}, "
        f"and both together {won['Attn-QAT searched 2000']}",
        f"searched scales with Q and K rotated and smoothed win {won['NVFP4 searched rotated smoothed']}, "
        f"and {won['NVFP4 searched rotated smoothed two kept']} if two of the six blocks stay in BF16",
    ):
        assert words in told


def test_without_gradient_norms_to_compare_there_is_no_figure_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a table of which Attn-QAT alone is trained yet, or one that was gathered when its trainings' logs were gone."""
    one = measured("ablations")
    assert "evidence-gradients.svg" in evidence_figures.draw({"ablations": one})
    assert "left out" not in capsys.readouterr().err
    for trainings in ([each for each in one["trainings"] if each["name"] == "qat"], [{**each, "grad_norm": []} for each in one["trainings"]], []):
        assert "evidence-gradients.svg" not in evidence_figures.draw({"ablations": {**one, "trainings": trainings}})
        assert "evidence-gradients.svg is left out: ablations has no gradient norms of a training beside qat" in capsys.readouterr().err


def test_tables_are_told_by_their_names(tmp_path: Path) -> None:
    for name in ("main/evidence.json", "tuning.json", "other.json", "sensitivity/sensitivity.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(name))
    found = read_tables([tmp_path / "main" / "evidence.json", tmp_path / "tuning.json", tmp_path / "sensitivity" / "sensitivity.json"])
    assert found == {"main": "main/evidence.json", "tuning": "tuning.json", "sensitivity": "sensitivity/sensitivity.json"}
    with pytest.raises(UserError, match="'other' is no table"):
        read_tables([tmp_path / "other.json"])
    with pytest.raises(KeyError, match="'others' is no table"):
        render("{{ losses('others') }}", {})


# The picture


def test_the_picture_holds_every_eleventh_video_of_each_row(tmp_path: Path) -> None:
    rows = {}
    for row, name in enumerate(("BF16", "NVFP4")):
        rows[name] = tmp_path / name
        for place in (0, 11):
            grey = np.full((5, 32, 32, 3), 60 * row + 5 * place, np.uint8) + 20 * np.arange(5, dtype=np.uint8)[:, None, None, None]
            write_video(rows[name] / "videos" / f"{place:03d}.mp4", grey, 8)
        (rows[name] / "result.json").write_text(json.dumps({"videos": [{"prompt": f"p{i}", "seed": i} for i in range(12)]}))
    sheet, shown = picture(rows)
    assert shown == [("p0", 0), ("p11", 11)]
    pixels = np.asarray(sheet)
    for column, name in enumerate(rows):
        for line, place in enumerate((0, 11)):
            frames = read_video(rows[name] / "videos" / f"{place:03d}.mp4")[0]
            strip = pixels[26 + line * 58 :, column * 108 :][:32, :96]
            assert np.array_equal(strip, np.concatenate(list(frames[[1, 2, 3]]), axis=1))
    save(sheet, tmp_path / "sheet.webp")
    assert Image.open(tmp_path / "sheet.webp").size == sheet.size
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match="larger than 100 bytes"):
        patch.setattr(evidence_picture, "MOST_BYTES", 100)
        save(sheet, tmp_path / "large.webp")
    assert not (tmp_path / "large.webp").exists()
    (rows["NVFP4"] / "result.json").write_text(json.dumps({"videos": [{"prompt": f"p{i}", "seed": i + 1} for i in range(12)]}))
    with pytest.raises(DataError, match="other prompts or seeds"):
        picture(rows)
    with pytest.raises(DataError, match="is no row"):
        picture({"a": tmp_path})


# Where 4 bits cost, in small: six blocks, as the table's rows name them


@pytest.fixture(scope="module")
def where(tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> EvidenceConfig:
    """The shipped table over a model of six tiny blocks, with one row of each kind; blocks were looked at on another cache."""
    out = tmp_path_factory.mktemp("where")
    build_pipeline(ExampleModelConfig(out=str(out / "base"), num_layers=6, num_heads=2, head_dim=16))
    shutil.copytree(tiny_cache, out / "tuning")
    words = [f"model={out / 'base'}", f"cache={out / 'tuning'}", f"out={out / 'sensitivity'}", "recipe=attn_qat", "samples=1", "timesteps=1"]
    execute("sensitivity", None, words, show_config=False)
    (out / "prompts.txt").write_text("a sneaker moves left\n")
    given = {"base": out / "base", "cache": tiny_cache, "held_out": tiny_cache, "out": out / "table", "prompts": out / "prompts.txt"}
    given |= {"sensitivity": out / "sensitivity" / "sensitivity.json", "st_lpips": "none", "samples": 2, "timesteps": 1}
    given |= {"sampling.height": 32, "sampling.width": 32, "sampling.num_inference_steps": 8}
    return load(EvidenceConfig, "evidence/where", [f"{key}={value}" for key, value in given.items()])


def test_where_runs_from_end_to_end(where: EvidenceConfig) -> None:
    assert plan(where)["rows"] == len(where.rows)
    chosen = ("BF16", "NVFP4", "worst 1 kept", "block 0 alone", "first 4 steps kept", "QK only", "Q twice", "MXFP8")
    without_videos = ("QK only", "Q twice", "MXFP8")
    rows = [replace(row, videos=row.videos and row.name not in without_videos) for row in where.rows if row.name in chosen]
    with in_this_process():
        told = run(replace(where, rows=rows))
    assert told["problems"] == []
    found = {row["name"]: row for row in told["rows"]}
    assert set(found) == set(chosen)
    full = found["NVFP4"]["four_bit_share"]
    assert 0.6 < full < 0.8  # 32 tokens of video, and 16 of text, which stay in BF16
    shares = {name: found[name]["four_bit_share"] / full for name in chosen}
    assert shares == pytest.approx(
        {
            "BF16": 0,
            "NVFP4": 1,
            "worst 1 kept": 5 / 6,
            "block 0 alone": 1 / 6,
            "first 4 steps kept": 1 / 2,
            "QK only": 1 / 2,
            "Q twice": 1,
            "MXFP8": 0,
        }
    )
    assert found["first 4 steps kept"]["clip_losses"] is None
    assert len(found["NVFP4"]["clip_losses"]) == 2
    worst = next(one["index"] for one in json.loads(Path(where.sensitivity).read_text())["layers"] if one["rank"] == 1)
    assert found["worst 1 kept"]["recipe"]["keep_layers"] == [worst]
    assert found["block 0 alone"]["recipe"]["keep_layers"] == [1, 2, 3, 4, 5]
    assert found["worst 1 kept"]["clip_losses"] != found["NVFP4"]["clip_losses"]
    assert [len(found[name]["videos"]) for name in chosen] == [1, 1, 1, 0, 1, 0, 0, 0]
    page = render("{{ shares('where') }}\n{{ blocks }}", {"where": told, "sensitivity": json.loads(Path(where.sensitivity).read_text())})
    assert "| first 4 steps kept |" in page
    assert page.count("\n| ") == len(chosen) + 1 + 6  # and a head
    assert "worst 1 kept" not in evidence_figures.draw({"where": told})["evidence-share.svg"]  # a number on the curve


def test_worst_blocks_are_not_chosen_by_what_shows_how_good_the_choice_was(where: EvidenceConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="legal: one of other clips than held_out"):
        replace(where, held_out=json.loads(Path(where.sensitivity).read_text())["settings"]["cache"]).validate()
    rows = [replace(row, recipe="attn_qat_search") if row.keep == 1 else row for row in where.rows]
    with pytest.raises(ConfigError, match=r"scale_divisors=.*as recipe attn_qat_search of row 'worst 1 kept' has it"):
        replace(where, rows=rows).validate()
    with pytest.raises(ConfigError, match="keep of 'worst 1 kept'=7"):
        replace(where, rows=[replace(row, keep=7) if row.keep == 1 else row for row in where.rows]).validate()
    with pytest.raises(ConfigError, match="is no result of `videoqat sensitivity`"):
        replace(where, sensitivity="").validate()
    with pytest.raises(ConfigError, match="unknown recipe key 'keep_layer'"):
        replace(where, rows=[replace(row, changes={"keep_layer": [0]}) if row.changes else row for row in where.rows]).validate()
    with pytest.raises(ConfigError, match="videos of the reference"):
        replace(where, rows=[replace(row, videos=row.name != "BF16") for row in where.rows]).validate()
