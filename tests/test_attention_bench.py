"""The benchmark: what it counts is counted by hand here, what it times is checked, and its tables say what was measured. No time is judged."""

import json
import math
import re
from pathlib import Path

import jinja2
import pytest
import torch

from videoqat.attention import bench, reference
from videoqat.attention.backends import KERNELS
from videoqat.attention.bench import bench_attention
from videoqat.attention.bench_check import relative_errors
from videoqat.attention.bench_table import MEASUREMENTS, render, text_table
from videoqat.config import ATTENTION_SHAPES, BenchAttentionConfig, RuntimeConfig, load
from videoqat.errors import AttentionError, ConfigError
from videoqat.recipes import RECIPES

CPU = RuntimeConfig(device="cpu")
TEMPLATES = sorted((Path(__file__).resolve().parent.parent / "docs" / "benchmarks").glob("*-attention-*.j2"))


def run(**settings):
    config = BenchAttentionConfig(**{"batch": 2, "num_tokens": 70, "num_heads": 2, "head_dim": 32, "repeats": 2, "runtime": CPU, **settings})
    config.validate()
    result = bench_attention(config)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    return result


def by_name(result, index=0):
    return {one["name"]: one for one in result["results"][index]["contenders"]}


def test_inference_only():
    result = run(num_keys=50)
    assert result["results"][0]["shape"] == {"name": "by numbers", "batch": 2, "num_queries": 70, "num_keys": 50, "num_heads": 2, "head_dim": 32}
    assert result["results"][0]["algorithmic_flop"] == {"inference": 4 * 2 * 2 * 70 * 50 * 32}
    contenders = by_name(result)
    assert list(contenders) == ["attn_qat_search", "sdpa"]
    recipe, sdpa = contenders.values()
    assert set(recipe["milliseconds"]) == {"inference"}
    assert recipe["ratio"] == {"sdpa": {"inference": recipe["milliseconds"]["inference"] / sdpa["milliseconds"]["inference"]}}
    assert [receipt["kernel"] for receipt in recipe["receipts"]] == ["torch"]
    assert (sdpa["receipts"], sdpa["ratio"]) == ([], {})
    assert set(recipe["relative_l2_error"]) == {"out"}
    assert result["results"][0]["unavailable"] == {}
    assert result["provenance"]["versions"]["torch"].startswith(torch.__version__.split("+")[0])


def test_with_backward_and_several_recipes():
    result = run(backward=True, recipes=["attn_qat", "sage3", "bf16"])
    flop = result["results"][0]["algorithmic_flop"]
    unit = 2 * 2 * 2 * 70 * 70 * 32
    assert flop == {"inference": 2 * unit, "forward": 2 * unit, "backward": 5 * unit, "forward_backward": 7 * unit}
    contenders = by_name(result)
    assert list(contenders) == ["attn_qat", "sage3", "bf16", "sdpa"]
    for one in contenders.values():
        assert tuple(one["milliseconds"]) == MEASUREMENTS
        for name, ms in one["milliseconds"].items():
            assert one["tflops"][name] == pytest.approx(flop[name] / (ms * 1e-3) / 1e12)
    for name in ("attn_qat", "sage3", "bf16"):
        errors = contenders[name]["relative_l2_error"]
        assert set(errors) == {"out", "dq", "dk", "dv"}
        assert max(errors.values()) < 1e-3
        assert contenders[name]["receipts"][0]["calls"] == 4  # inference, two of training, one to see what is kept
    # fp32 q, k, v and two floats a row; plain attention keeps its output as well, and one float a row
    assert contenders["attn_qat"]["saved_bytes"] == 3 * 4 + 2 * 4 / 32
    assert contenders["attn_qat"]["saved_bytes_without_output"] == contenders["attn_qat"]["saved_bytes"]
    assert contenders["bf16"]["saved_bytes"] == pytest.approx(16, abs=0.3)
    assert contenders["bf16"]["saved_bytes_without_output"] == contenders["bf16"]["saved_bytes"] - 4


def test_a_recipe_without_backward_is_timed_forward_and_says_why(monkeypatch):
    why_not = KERNELS["torch"].why_not
    monkeypatch.setattr(KERNELS["torch"], "why_not", lambda *args: "it doesn't train" if args[-1] else why_not(*args))
    result = run(backward=True)
    assert list(by_name(result)["attn_qat_search"]["milliseconds"]) == ["inference"]
    assert tuple(by_name(result)["sdpa"]["milliseconds"]) == MEASUREMENTS
    assert "it doesn't train" in result["results"][0]["unavailable"]["attn_qat_search, backward"]


def test_a_backend_of_torch_that_can_not_serve_is_named(monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel\nfor you")

    monkeypatch.setattr(bench, "_of_torch", lambda device: [bench.Contender("sdpa_cudnn", broken)])
    result = run()
    assert list(by_name(result)) == ["attn_qat_search"]
    assert result["results"][0]["unavailable"] == {"sdpa_cudnn": "no kernel"}


def test_on_triton_it_counts_what_the_kernels_multiply(monkeypatch):
    """48 channels are multiplied as 64; the paper's recipe finds the maximum first."""
    monkeypatch.setattr(bench, "PREPASS_CALLS", 1)
    settings = {"batch": 1, "num_tokens": 20, "num_heads": 1, "head_dim": 48, "backward": True, "repeats": 1}
    runtime = RuntimeConfig(kernel="triton") if torch.cuda.is_available() else RuntimeConfig(device="cpu", kernel="triton")
    contenders = by_name(run(**settings, recipes=["attn_qat", "attn_qat_paper"], runtime=runtime))
    unit = 2 * 20 * 20 * 64
    for name, forward in (("attn_qat", 2), ("attn_qat_paper", 3)):
        one = contenders[name]
        assert one["executed_flop"] == dict(zip(MEASUREMENTS, (forward * unit, forward * unit, 8 * unit, (forward + 8) * unit), strict=True))
        assert one["executed_tflops"]["backward"] == pytest.approx(8 * unit / one["milliseconds"]["backward"] / 1e9)
        assert one["prepass_share"]["forward"] == one["prepass_milliseconds"]["forward"] / one["milliseconds"]["forward"]
    element = 2 if torch.cuda.is_available() else 4
    # q and k: 24 bytes of codes and 3 scales a token; v: two blocks of 16 tokens; m and l; and the output
    kept = (2 * (24 + 3) * 20 + 2 * (8 * 48 + 48) + 2 * 4 * 20) / (20 * 48)
    assert contenders["attn_qat"]["saved_bytes_without_output"] == pytest.approx(kept)
    assert contenders["attn_qat"]["saved_bytes"] == pytest.approx(kept + element)


# The check


def correct(recipe="attn_qat", num_queries=150, num_keys=90):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(2, n, 2, 32, generator=generator) for n in (num_queries, num_keys, num_keys, num_queries))
    out, _, *sums = reference.forward(q, k, v, RECIPES[recipe])
    return (q, k, v, grad_out), (out, *reference.backward(grad_out, q, k, v, *sums, RECIPES[recipe]))


@pytest.mark.parametrize("recipe", ["attn_qat", "sage3", "mxfp4", "bf16"])
def test_the_check_passes_what_is_right(recipe, monkeypatch):
    monkeypatch.setattr("videoqat.attention.bench_check.TILE_ELEMENTS", 2000)  # several tiles
    inputs, outputs = correct(recipe)
    assert max(relative_errors(*inputs, outputs, RECIPES[recipe]).values()) < 1e-12


@pytest.mark.parametrize(("which", "name"), enumerate(["out", "dq", "dk", "dv"]))
def test_the_check_sees_each_wrong_output(which, name):
    inputs, outputs = correct()
    outputs[which][1, -1, 1] *= 1.5
    errors = relative_errors(*inputs, outputs, RECIPES["attn_qat"])
    assert [other for other, error in errors.items() if error > 1e-3] == [name]


def test_the_check_sees_every_head_and_sample():
    for b, h in ((0, 0), (0, 1), (1, 0)):
        inputs, outputs = correct()
        outputs[0][b, :, h] = 0
        assert relative_errors(*inputs, outputs, RECIPES["attn_qat"])["out"] > 0.3


@pytest.mark.parametrize("factor", [0.9, math.nan])
def test_a_wrong_kernel_gets_no_timing(factor, monkeypatch):
    forward = KERNELS["torch"].forward

    def wrong(*args):
        out, *rest = forward(*args)
        return out * factor, *rest

    monkeypatch.setattr(KERNELS["torch"], "forward", wrong)
    result = run(recipes=["attn_qat", "bf16"])
    assert list(by_name(result)) == ["bf16", "sdpa"]
    assert result["results"][0]["unavailable"]["attn_qat"].startswith("wrong: relative L2 error {'out'")
    assert result["exit_code"] == 1
    assert run(recipes=["bf16"])["exit_code"] == 0


# Settings


def test_named_shapes_are_the_models():
    """Tokens of a video: latent frames times patches; CogVideoX and HunyuanVideo add their text."""

    def tokens(frames, height, width):
        return ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)

    named = {name: (shape.num_queries, shape.num_heads * shape.head_dim) for name, shape in ATTENTION_SHAPES.items()}
    assert named["wan-1.3b"] == (tokens(81, 480, 832), 1536)
    assert named["wan-14b"] == (tokens(81, 480, 832), 5120)
    assert named["wan-14b-720p"] == (tokens(81, 720, 1280), 5120)
    assert named["cogvideox-2b"] == (tokens(49, 480, 720) + 226, 1920)
    assert named["hunyuanvideo"] == (tokens(129, 720, 1280) + 256, 3072)
    assert ATTENTION_SHAPES["wan-1.3b-cross"].num_keys == 512
    config = load(BenchAttentionConfig, None, ["shapes=[wan-14b, short]"])
    assert config.chosen_shapes() == [ATTENTION_SHAPES["wan-14b"], ATTENTION_SHAPES["short"]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("shapes=[wan]", "shapes='wan' is not legal; legal: wan-1.3b, wan-14b,"),
        ("shapes=[short,short]", "names that differ"),
        ("shapes=[short] head_dim=128", "head_dim=128 is not legal; legal: either shapes or head_dim"),
        ("recipes=[sage3] recipe=attn_qat", "recipe='attn_qat' is not legal; legal: either recipes or recipe"),
        ("recipes=[attn_qat,int3]", "recipe 'int3' does not exist; legal: bf16, attn_qat"),
        ("num_keys=0", "num_keys=0 is not legal; legal: at least 1, or null"),
    ],
)
def test_settings_that_are_refused(settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(BenchAttentionConfig, None, settings.split())


def test_what_this_machine_can_not_do():
    with pytest.raises(AttentionError, match="head_dim=24 is not a multiple of 16"):
        run(head_dim=24)


# Tables


def test_text_table():
    table = text_table(run(backward=True, recipes=["attn_qat", "sage3"])["results"][0]).splitlines()
    assert [line.split()[0] for line in table] == ["ms", "attn_qat", "sage3", "sdpa"]
    assert len({len(line) for line in table}) == 1
    assert table[0].split() == ["ms", "(x", "sdpa)", *MEASUREMENTS, "kept", "B", "error"]


def as_on_a_gpu(result):
    """The result with torch's SDPA called cuDNN."""
    return json.loads(json.dumps(result).replace('"sdpa"', '"sdpa_cudnn"'))


def test_render():
    first = as_on_a_gpu(run(backward=True, recipes=["attn_qat", "sage3"]))
    second = as_on_a_gpu(run(num_tokens=64, num_keys=16))
    second["results"][0]["shape"]["name"] = "other"
    page = render(
        "{{ runs }}\n{{ times }}\n\n{{ memory }}\n\n{{ rates }}\n"
        "{{ ratio('other', 'attn_qat_search', 'inference') }} {{ value('by numbers', 'sage3', 'saved_bytes') }}\n",
        [first, second],
    )
    lines = page.splitlines()
    times = by_name(first)["attn_qat"]["milliseconds"]["backward"], by_name(first)["attn_qat"]["ratio"]["sdpa_cudnn"]["backward"]
    row = next(line for line in lines if "attn_qat |" in line)
    assert row.startswith("| by numbers: 70 x 2 x 32 | attn_qat |")
    assert f" {times[0]:.2f} ({times[1]:.2f}) |" in row
    assert any(line.startswith("| other: 64 to 16 x 2 x 32 | attn_qat_search |") for line in lines)
    ratio = second["results"][0]["contenders"][0]["ratio"]["sdpa_cudnn"]["inference"]
    assert lines[-1] == f"{ratio} {3 * 4 + 2 * 4 / 32}"
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert len(tables) == 3 * (2 + 5)
    assert first["provenance"]["date"] in page
    assert "not installed" not in page


@pytest.mark.parametrize("template", ["{{ value('wan-14b', 'attn_qat', 'saved_bytes') }}", "{{ nothing }}", "{{ value('by numbers', 'sdpa', 'x') }}"])
def test_a_page_can_not_ask_for_what_was_not_measured(template):
    with pytest.raises((KeyError, jinja2.UndefinedError)):
        render(template, [run()])


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_of_pages_ask_for_shapes_and_measurements_that_exist(template):
    asked = re.findall(r"(ratio|value)\((\"[^)]*\")\)", template.read_text())
    assert asked
    for function, words in asked:
        shape, recipe, *keys = json.loads(f"[{words}]")
        assert shape in (*ATTENTION_SHAPES, "by numbers")
        assert recipe in RECIPES
        assert keys[-1] in MEASUREMENTS if function == "ratio" else keys


@pytest.mark.gpu
def test_on_a_gpu():
    settings = {"batch": 1, "num_tokens": 256, "num_keys": 200, "head_dim": 64, "backward": True}
    result = run(**settings, recipes=["attn_qat", "sage3"], runtime=RuntimeConfig(kernel="triton"))
    contenders = by_name(result)
    assert set(result["results"][0]["unavailable"]) == {"sage3, backward"}
    assert list(contenders) == ["attn_qat", "sage3", "sdpa_cudnn", "sdpa_flash"]
    for name, one in contenders.items():
        both = {"inference"} if name == "sage3" else {"inference", "forward_backward"}
        assert set(one["peak_bytes"]) == both
        assert all(size > 0 for size in one["peak_bytes"].values())
        assert set(one["ratio"]) == {"sdpa_cudnn", "sdpa_flash"} - {name}
    assert max(contenders["attn_qat"]["relative_l2_error"].values()) < 4e-3
    assert contenders["sdpa_cudnn"]["saved_bytes"] == pytest.approx(2 + 2 + 2 * 2 * 200 / 256, rel=0.05)
    assert "0" in text_table(result["results"][0])
