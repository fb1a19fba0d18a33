"""The page: self-contained, complete, safe with whatever a prompt holds, and built from report.json and the videos alone."""

import base64
import html.parser
import json
import re

import numpy as np
import pytest

from videoqat.data.video_io import write_video
from videoqat.errors import DataError, UserError
from videoqat.evaluation import charts
from videoqat.evaluation.curves import read_curves
from videoqat.evaluation.fidelity import fidelity, flicker, summarise
from videoqat.evaluation.report import write_report
from videoqat.recipes import RECIPES
from videoqat.training.validation import summarise as summarise_losses

HOSTILE = """</title><script>alert("x")</script> & 'quotes' <img src=x onerror=alert(1)> {{ 7 * 7 }} $x^2$ http://evil.example"""


def receipt(recipe: str, native: bool) -> dict:
    return {"kernel": "sdpa" if native else "torch", "native": native, "reason": "because", "device": "cpu", "recipe": recipe}


def make_report(out, *, prompt=HOSTILE, name="FP4 <b>", validation=True, emulated=True, same=False, training=True) -> dict:
    """A report of two entries, one prompt, two seeds, and its folder."""
    rng = np.random.default_rng(0)
    names, recipes = ["BF16", name], ["bf16", "attn_qat"]
    records = []
    for seed in (0, 1):
        reference = rng.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
        for index, repeat in ((0, False), (1, False), (0, True)):
            frames = reference if index == 0 or same else np.clip(reference + rng.normal(0, 9, reference.shape), 0, 255).astype(np.uint8)
            file = f"videos/{index}-{seed}-{repeat}.mp4"
            write_video(out / file, frames, 16)
            records.append(
                {
                    "entry": names[index],
                    "prompt": prompt,
                    "seed": seed,
                    "repeat": repeat,
                    "file": file,
                    "timings": {},
                    "receipts": [],
                    "warnings": [],
                    "flicker": flicker(frames),
                    "fidelity": fidelity(reference, frames) if index or repeat else None,
                    "commit": "c0ffee",
                }
            )
    losses = {n: 0.1 + 0.01 * i + rng.random((4, 2)) * 0.001 for i, n in enumerate(names)}
    summaries = summarise_losses(losses, "BF16")
    entries = [
        {
            "name": n,
            "model": f"models/{n}",
            "recipe": RECIPES[recipes[i]].to_dict(),
            "receipts": [receipt("bf16", True)] + ([receipt("attn_qat", not emulated)] if i else []),
            "latency": {"text_s": 0.01, "denoise_s": 0.5 + i, "vae_s": 0.1, "total_s": 0.61 + i, "step_s": 0.02},
            "validation": {**summaries[n], "losses": losses[n].tolist()} if validation else None,
            "fidelity": summarise([r["fidelity"] for r in records if r["entry"] == n and not r["repeat"]]) if i else None,
            "flicker": 3.0 + i,
            "layers": {f"blocks.{k}.attn1": {"relative_error": 0.05 + 0.01 * k} for k in range(12)} if i else {},
            "training": {"step": list(range(1000)), "loss": [1.0] * 1000, "health": {"step": [1, 2], "layers": {"a": [0.1, None], "b": [0.2, 0.3]}}}
            if training and i
            else None,
            "warnings": [f"{n} was trained for <i>another</i> recipe"] if i else [],
        }
        for i, n in enumerate(names)
    ]
    report = {
        "reference": "BF16",
        "prompts": [prompt],
        "seeds": [0, 1],
        "entries": entries,
        "floor": summarise([r["fidelity"] for r in records if r["repeat"]]),
        "videos": records,
        "settings": {
            "sampling": {"num_frames": 5, "width": 32, "height": 32, "num_inference_steps": 4, "negative_prompt": "<u>"},
            "dtype": "torch.float32",
        },
        "provenance": {
            "date": "2026-11-30T07:00:00+00:00",
            "command": "videoqat <compare>",
            "commit": "c0ffee",
            "versions": {"torch": "2"},
            "device": "CPU",
        },
        "commits": ["c0ffee"],
        "ranks": [1],
    }
    (out / "report.json").write_text(json.dumps(report, allow_nan=False))
    return report


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the text that a reader sees."""

    VOID = ("meta", "img", "br", "link", "input", "hr")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data


def test_every_scene_is_shown_also_where_prompt_and_seed_are_those_of_another(tmp_path):
    """As of two pictures that are told the same."""
    report = make_report(tmp_path)
    for record in report["videos"]:
        record["seed"] = 0
    (tmp_path / "report.json").write_text(json.dumps(report))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    found = [attributes["src"] for tag, attributes in page.tags if tag == "video"]
    shown = [record["file"] for record in report["videos"] if not record["repeat"]]
    assert found == ["data:video/mp4;base64," + base64.b64encode((tmp_path / file).read_bytes()).decode() for file in shown]
    assert "after an untimed warm-up" in page.text


@pytest.fixture
def page(tmp_path):
    make_report(tmp_path)
    return Page(write_report(tmp_path).read_text(encoding="utf-8"))


def test_every_video_is_in_the_page(page, tmp_path):
    videos = [attributes for tag, attributes in page.tags if tag == "video"]
    shown = [base64.b64decode(v["src"].removeprefix("data:video/mp4;base64,")) for v in videos]
    assert shown == [(tmp_path / f"videos/{index}-{seed}-False.mp4").read_bytes() for seed in (0, 1) for index in (0, 1)]
    assert all({"loop", "muted", "autoplay", "playsinline", "controls"} <= set(v) and v["class"] == "tiny" for v in videos)


def test_the_page_asks_nobody_for_anything(page):
    assert page.open == []  # every element is closed
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form"), tag
        for name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset"):
            value = attributes.get(name) or ""
            assert value == "" or value.startswith(("#", "data:video/mp4;base64,")), value
        assert not any(name.startswith("on") for name in attributes), attributes
    styles = " ".join(attributes.get("style") or "" for _, attributes in page.tags)
    assert "url(" not in re.sub(r"url\(#[^)]+\)", "", styles)


def test_no_address_stands_in_the_page(tmp_path):
    make_report(tmp_path, prompt="a sneaker moves left")
    source = write_report(tmp_path).read_text()
    assert not re.search(r"https?:|//[a-z]|@import", re.sub(r'src="data:[^"]*"', "", source))


def test_hostile_text_stays_text(page, tmp_path):
    assert page.text.count(HOSTILE) == 2  # one heading for each seed
    assert "{{ 7 * 7 }}" in page.text
    assert sum(tag == "script" for tag, _ in page.tags) == 1  # our own
    for tag in ("b", "i", "u", "img"):
        assert all(found != tag for found, _ in page.tags)
    assert "FP4 <b>" in page.text


def test_numbers_in_the_page_are_those_of_the_report(page, tmp_path):
    report = json.loads((tmp_path / "report.json").read_text())
    entry = report["entries"][1]
    assert f"{entry['validation']['loss']:.5f}" in page.text
    assert f"+{entry['validation']['difference']:.5f} (+{100 * entry['validation']['relative']:.2f} %)" in page.text
    assert f"{entry['fidelity']['psnr_mean']:.1f} dB" in page.text
    assert f"{entry['fidelity']['ssim_mean']:.3f}" in page.text
    assert "1.33 times reference" in page.text
    assert "text 10 ms, denoising 1.5 s (20 ms a step), VAE 0.1 s" in " ".join(page.text.split())
    assert "attn_qat ran on kernel torch, emulated, cpu: because" in " ".join(page.text.split())
    assert "was trained for <i>another</i> recipe" in page.text
    assert "videoqat <compare>" in page.text


def test_st_lpips_has_its_column_where_it_was_measured_and_else_says_why(page, tmp_path):
    assert "ST-LPIPS" not in page.text  # a report of an earlier version
    report = json.loads((tmp_path / "report.json").read_text())
    report["floor"] |= {"psnr_mean": 30.0, "psnr_min": 29.0, "ssim_mean": 0.9, "ssim_min": 0.8, "identical_videos": 0}
    (tmp_path / "report.json").write_text(json.dumps(report | {"st_lpips": {"absent": "its weights are elsewhere"}}))
    page = Page(write_report(tmp_path).read_text())
    assert "No ST-LPIPS: its weights are elsewhere." in page.text
    assert page.text.count("ST-LPIPS") == 1
    found = [report["floor"], report["entries"][1]["fidelity"], *(video["fidelity"] for video in report["videos"] if video["fidelity"])]
    for number, one in enumerate(found, start=1):
        one |= {"st_lpips_mean": 0.01 * number, "st_lpips_max": 0.015 * number}
    (tmp_path / "report.json").write_text(json.dumps(report | {"st_lpips": {"sha256": "b356"}}))
    page = Page(write_report(tmp_path).read_text())
    assert page.open == []
    heads = [tag for tag, _ in page.tags].count("th")
    assert heads == 8 + 2  # columns, and a row for each entry
    assert "0.0100worst 0.0150" in page.text  # the floor, in the reference's row
    assert "0.0200worst 0.0300" in page.text
    assert "30.0 dB apart, SSIM 0.900, ST-LPIPS 0.0100" in page.text
    assert page.text.count(", ST-LPIPS 0.0") == 1 + 2  # and below each video of the second entry


def test_caveats_follow_what_was_measured(tmp_path):
    for folder, options in {"a": {}, "b": {"emulated": False, "same": True, "validation": False, "training": False}}.items():
        (tmp_path / folder).mkdir()
        make_report(tmp_path / folder, **options)
    a, b = (Page(write_report(tmp_path / folder).read_text()).text for folder in "ab")
    assert "BF16 rendered twice is bit for bit the same" in a
    assert "quantised attention is emulated" in a
    assert "quantised attention is emulated" not in b
    assert "No validation loss" not in a
    assert "No validation loss" in b
    assert "identical to the reference" in b
    assert "Training loss" in a
    assert "Training loss" not in b


def test_plots_share_a_page_without_sharing_names(tmp_path):
    make_report(tmp_path)
    tags = Page(write_report(tmp_path).read_text()).tags
    assert sum(tag == "svg" for tag, _ in tags) == 5
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = {attributes["xlink:href"][1:] for _, attributes in tags if "xlink:href" in attributes}
    references |= {name for _, a in tags for value in a.values() for name in re.findall(r"url\(#([^)]+)\)", value or "")}
    assert references
    assert references <= set(ids)


def test_plots_take_the_pages_colour_of_text(tmp_path):
    report = make_report(tmp_path)
    svg = charts.validation(report["entries"])
    assert "currentColor" in svg
    assert charts.INK not in svg
    assert not re.search(r"<text[^>]*fill: #", svg)
    assert "FP4 &lt;b&gt;" in svg


def test_long_curves_are_thinned_to_means():
    step, loss = charts._thin(list(range(1000)), [float(i % 2) for i in range(1000)])
    assert len(step) == len(loss) == 250
    assert step[:2].tolist() == [1.5, 5.5]
    assert set(loss.tolist()) == {0.5}
    assert charts._smooth(np.array([1.0, 2.0, 6.0])).tolist() == [1.5, 3.0, 4.0]


def test_a_report_without_its_parts_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no report\.json"):
        write_report(tmp_path)
    report = make_report(tmp_path)
    missing = tmp_path / report["videos"][0]["file"]
    missing.unlink()
    with pytest.raises(UserError, match=re.escape(str(missing))):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_curves_come_from_the_training_log(tmp_path):
    with pytest.raises(DataError, match=r"log\.jsonl"):
        read_curves(tmp_path)
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4, "health": {"a": {"relative_error": 0.1}, "b": {"relative_error": 0.2}}}]
    rows += [{"step": 3, "loss": 0.3, "health": {"a": {"relative_error": 0.3}}}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "lo')
    found = read_curves(tmp_path)
    assert (found["step"], found["loss"]) == ([1, 2, 3], [0.5, 0.4, 0.3])
    assert found["health"] == {"step": [2, 3], "layers": {"a": [0.1, 0.3], "b": [0.2, None]}}
