"""The page in a real browser, against a real server with a token and a tiny model: what its users do, from the prompt to the vote."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from helpers.service import PATIENCE_S, SMALL, Running, free_port, wait_for

TOKEN = "only for this test, really"
COMPARED = ["bf16", "attn_qat"]
CLIP = {"num_frames": 9, "fps": 4, "size": "32x32", "num_inference_steps": 1}  # 2.25 s of 9 frames
FRAME_S = 1 / 4
VIDEOS = "document.querySelectorAll('vq-comparison vq-player video')"
TIMES = f"[...{VIDEOS}].map((video) => video.currentTime)"


@pytest.fixture(scope="module")
def service(tiny_pipeline, tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("page") / "service"
    token = folder.with_suffix(".token")
    token.write_text(TOKEN)
    sampling = {"num_frames": 5, "width": 32, "height": 32, "num_inference_steps": 2}
    models = [{"name": "tiny", "path": str(tiny_pipeline), "sampling": sampling}]
    limits = {"max_queued": 4, "max_steps": 2000}
    running = Running(
        folder,
        {"models": models, "limits": limits, "page": True, "compare": COMPARED, "token_file": str(token), "port": free_port(), "retries": 0},
    )
    running.http.headers["Authorization"] = f"Bearer {TOKEN}"
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, which is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs chromium, of Debian's package chromium, which is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"] if os.getuid() == 0 else [])
        yield opened
        opened.close()


@pytest.fixture
def open_page(service, browser) -> Iterator[Callable[..., Any]]:
    """Opens the page, by default with the token known; at the end it must have asked nobody else, and have had no error of its own."""
    asked: list[str] = []
    errors: list[str] = []
    contexts = []

    def open_it(query: str = "", *, token: bool = True, **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1200, "height": 1000}} | options))
        contexts.append(context)
        if token:
            context.add_init_script(f"sessionStorage.setItem('videoqat-token', {json.dumps(TOKEN)})")
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" and "Failed to load resource" not in said.text else None)
        page.goto(f"{service.url}/{query}")
        page.wait_for_selector("vq-gallery h2")
        return page

    yield open_it
    for context in contexts:
        context.close()
    strangers = [url for url in asked if not url.startswith((f"{service.url}/", "blob:", "data:"))]
    assert asked
    assert not strangers
    assert not errors


@pytest.fixture(scope="module")
def comparison(service) -> dict[str, Any]:
    """One that is complete and measured."""
    first = service.submit(compare=COMPARED, floor=True, seed=7, **{**SMALL, **CLIP})
    for video in service.http.get(f"/v1/comparisons/{first['comparison_id']}").json()["videos"]:
        service.until(video["id"])
    return measured(service, first["comparison_id"])


def measured(service: Running, name: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = service.http.get(f"/v1/comparisons/{name}").json()
        return found if found["differences"] is not None else None

    found: dict[str, Any] = wait_for(look, "the comparison is measured")
    return found


def fill(page: Any, **fields: Any) -> None:
    for name, value in fields.items():
        page.locator(f"#vq-{name}").locator("textarea, input").first.fill(str(value))


def opened(page: Any) -> str:
    page.wait_for_url("**/?comparison=comparison_*")
    return str(page.url.rpartition("=")[2])


def middle(frame: int) -> list[float]:
    """Where both videos stand when they show a frame: in its middle."""
    return [(frame + 0.5) * FRAME_S] * 2


def is_ready(page: Any, where: str = "vq-comparison") -> None:
    page.wait_for_function(f"[...document.querySelectorAll('{where} vq-player video')].filter((video) => video.readyState >= 2).length === 2")


@pytest.mark.browser
def test_from_the_token_to_two_videos_their_figures_and_a_link(service, open_page):
    page = open_page(token=False)
    page.get_by_label("This service needs a token").fill("not the right one at all")
    page.get_by_role("button", name="Use it").click()
    page.get_by_label("That token isn't the right one").fill(TOKEN)
    page.get_by_role("button", name="Use it").click()
    page.wait_for_function("document.querySelector('#vq-steps input')?.value === '2'")  # the model's default
    assert page.locator("#vq-frames input").input_value() == "5"
    assert page.locator("#vq-left input").input_value() == "bf16"
    assert page.locator("#vq-right input").input_value() == "attn_qat"

    page.get_by_role("button", name="a sneaker moves left").click()
    fill(page, seed=3, steps=3, guidance=2, negative="blurred")
    page.get_by_role("button", name="Generate").click()
    name = opened(page)
    is_ready(page)
    page.wait_for_selector("vq-comparison .vq-floor")
    found = measured(service, name)
    reference, other, floor = found["videos"]
    assert (found["prompt"], reference["seed"], reference["negative_prompt"]) == ("a sneaker moves left", 3, "blurred")
    assert [(video["attention"], video["num_inference_steps"], video["guidance_scale"]) for video in found["videos"]] == [
        ("bf16", 3, 2.0), ("attn_qat", 3, 2.0), ("bf16", 3, 2.0),
    ]  # fmt: skip
    assert found["floor"] == floor["id"]

    text = page.locator("vq-comparison").inner_text()
    assert "a sneaker moves left" in text
    assert "32 × 32, 5 frames, 3 steps, guidance 2, seed 3, tiny" in text
    kernels = page.locator(".vq-kernels").all_inner_texts()
    assert re.search(r"sdpa\s*native\s*bf16, cpu", kernels[0])
    assert re.search(r"torch\s*emulated\s*attn_qat, cpu", kernels[1])
    captions = page.locator("vq-comparison figcaption").all_inner_texts()
    assert [re.sub(r"\s+", " ", caption) for caption in captions] == ["bf16 sdpa native", "attn_qat torch emulated"]
    own, theirs = (video["result"]["timings"]["denoise_s"] for video in (reference, other))
    assert f"{own / theirs:.2f}×" in page.locator("tr", has_text="Denoising").inner_text()
    assert f"{other['result']['peak_memory_bytes'] / 2**20:.0f} MiB" in page.locator("tr", has_text="Peak memory").inner_text()
    differences = found["differences"]["videos"][other["id"]]
    line = page.locator("tr:has(+ tr.vq-floor)").inner_text()
    assert f"{differences['psnr_mean']:.1f} dB" in line
    assert f"{differences['ssim_mean']:.3f}" in line
    assert "identical" in page.locator("tr.vq-floor").inner_text()  # the floor: bf16 twice on one machine

    page.reload()
    is_ready(page)
    assert opened(page) == name
    assert page.locator("vq-comparison h2").inner_text() == "a sneaker moves left"
    page.get_by_role("link", name="a sneaker moves left").wait_for()


@pytest.mark.browser
def test_both_videos_keep_in_step(open_page, comparison):
    page = open_page(f"?comparison={comparison['id']}")
    is_ready(page)
    page.wait_for_function(f"{TIMES}.every((time) => time > 0.3)")  # it plays by itself
    apart = page.evaluate(
        f"""async () => {{
            const found = [];
            for (let i = 0; i < 60; i++) {{
                await new Promise(requestAnimationFrame);
                const [a, b] = {TIMES};
                found.push(Math.abs(a - b));
            }}
            return found.sort((a, b) => a - b);
        }}"""
    )
    assert apart[len(apart) // 2] < FRAME_S
    player = page.locator("vq-comparison vq-player")
    player.get_by_label("Speed").select_option("0.25")
    assert page.evaluate(  # led astray, the second comes back, and not by the first's catching up or beginning again
        f"""async () => {{
            const [first, second] = {VIDEOS};
            while (first.currentTime > 0.5) await new Promise(requestAnimationFrame);
            second.currentTime = 1.8;
            const before = first.currentTime;
            while (second.seeking || Math.abs(second.currentTime - first.currentTime) > {FRAME_S / 2}) {{
                await new Promise(requestAnimationFrame);
                if (first.currentTime < before || first.currentTime > 1.6) return false;
            }}
            return true;
        }}"""
    )
    player.get_by_label("Speed").select_option("2")
    page.wait_for_function(f"{TIMES}[0] > 1")
    page.wait_for_function(f"{TIMES}[0] < 1")  # around again
    player.get_by_role("button", name="Pause").click()
    player.get_by_label("Frame", exact=True).fill("3")
    assert page.evaluate(TIMES) == pytest.approx(middle(3))
    player.get_by_role("button", name="One frame on").click()
    player.get_by_role("button", name="One frame on").click()
    player.get_by_role("button", name="One frame back").click()
    assert page.evaluate(TIMES) == pytest.approx(middle(4))
    assert "frame 5 / 9" in player.inner_text()
    player.get_by_label("Speed").select_option("0.5")
    assert page.evaluate(f"[...{VIDEOS}].map((video) => video.playbackRate)") == [0.5, 0.5]
    player.get_by_label("loop").uncheck()
    player.get_by_label("Frame", exact=True).fill("7")
    player.get_by_label("Wipe between the two videos").focus()
    page.keyboard.press("Space")
    player.get_by_role("button", name="Pause").wait_for()
    player.get_by_role("button", name="Play").wait_for()  # at the end, which is not the beginning of another round
    assert page.evaluate(TIMES) == pytest.approx(middle(8))


@pytest.mark.browser
def test_the_wipe_and_side_by_side(open_page, comparison):
    page = open_page(f"?comparison={comparison['id']}")
    is_ready(page)
    player = page.locator("vq-comparison vq-player")
    wipe = player.get_by_label("Wipe between the two videos")
    clips = "[...document.querySelectorAll('vq-comparison figure')].map((figure) => getComputedStyle(figure).clipPath)"
    assert page.evaluate(clips) == ["inset(0px 50% 0px 0px)", "inset(0px 0px 0px 50%)"]
    wipe.focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    assert page.evaluate(clips) == ["inset(0px 40% 0px 0px)", "inset(0px 0px 0px 60%)"]
    box = wipe.bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.up()
    assert abs(int(wipe.input_value()) - 20) <= 3
    player.get_by_label("side by side").check()
    assert page.evaluate(clips) == ["none", "none"]
    left, right = (figure.bounding_box() for figure in player.locator("figure").all())
    assert left["x"] + left["width"] <= right["x"]
    assert left["y"] == right["y"]
    player.get_by_label("Right").select_option("bf16, again")
    page.wait_for_function("document.querySelector('vq-comparison .second figcaption').textContent.includes('bf16, again')")
    is_ready(page)


@pytest.mark.browser
def test_a_blind_vote_tells_afterwards(service, open_page, comparison):
    before = sum(pair["votes"] for pair in service.http.get("/v1/votes").json()["data"])
    page = open_page(f"?comparison={comparison['id']}")
    page.get_by_role("button", name="Vote on it, blind").click()
    is_ready(page, "vq-vote")
    section = page.locator("vq-vote")
    assert section.locator("figcaption").all_inner_texts() == ["A", "B"]
    if not before:
        assert "bf16" not in section.inner_text()
    section.get_by_role("button", name="B is better").click()
    section.get_by_text(re.compile(r"You found B better\. A was tiny: (bf16|attn_qat); B was tiny: (bf16|attn_qat)\.")).wait_for()
    section.locator("td", has_text="tiny: attn_qat").wait_for()
    assert sum(pair["votes"] for pair in service.http.get("/v1/votes").json()["data"]) == before + 1
    assert section.get_by_role("button", name="A is better").is_disabled()
    section.get_by_role("button", name="Another pair").click()
    page.wait_for_function("!document.querySelector('vq-vote [data-choice=a]').disabled")


@pytest.mark.browser
def test_what_is_refused_is_said_in_the_apis_words(service, open_page):
    page = open_page()
    page.wait_for_function("document.querySelector('#vq-steps input')?.value === '2'")
    notice = page.locator("vq-notice")
    press = page.get_by_role("button", name="Generate")
    press.click()
    notice.get_by_text("Please write a prompt").wait_for()
    fill(page, prompt="a bag moves up", size="33x32")
    press.click()
    words = service.http.post("/v1/videos", json={"prompt": "a bag", "size": "33x32", "compare": True}).json()["error"]["message"]
    notice.get_by_text(words).wait_for()
    fill(page, size="32x32", seed="x")
    press.click()
    notice.get_by_text("Seed x is no whole number").wait_for()
    assert "comparison" not in page.url
    page.goto(f"{service.url}/?comparison=comparison_nobody")
    page.get_by_text("This comparison isn't there").wait_for()
    page.get_by_role("link", name="API").click()
    page.get_by_role("heading", name="POST /v1/videos", exact=True).wait_for()  # and nobody else was asked for it


@pytest.mark.browser
def test_progress_a_full_queue_a_server_away_and_cancelling(service, open_page):
    page = open_page()
    page.wait_for_function("document.querySelector('#vq-steps input')?.value === '2'")
    fill(page, prompt="<b>a coat</b> moves down", steps=1500)
    page.get_by_role("button", name="Generate").click()
    name = opened(page)
    page.get_by_text(re.compile(r"denoising, step \d+ of 1500")).wait_for()
    page.get_by_text("number 2 in the queue").wait_for()
    assert page.locator("vq-comparison h2").inner_text() == "<b>a coat</b> moves down"  # text, never markup
    page.get_by_role("button", name="Generate").click()
    page.locator("vq-notice").get_by_text("The queue is full").wait_for()
    page.context.set_offline(True)
    page.get_by_text("The server doesn't answer. Trying again").wait_for()
    page.context.set_offline(False)
    page.wait_for_function("!document.querySelector('vq-comparison').textContent.includes('Trying again')")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("There is no video to show.").wait_for()
    assert page.locator(".vq-state").all_inner_texts() == ["cancelled"] * 3
    assert {video["status"] for video in service.http.get(f"/v1/comparisons/{name}").json()["videos"]} == {"cancelled"}


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_and_by_keyboard(open_page, comparison, scheme):
    page = open_page(
        f"?comparison={comparison['id']}", viewport={"width": 360, "height": 740}, color_scheme=scheme, reduced_motion="reduce", has_touch=True
    )
    is_ready(page)
    page.wait_for_selector(".vq-floor")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(f"[...{VIDEOS}].every((video) => video.paused)")  # who wants less motion gets none unasked
    ground, ink = (
        sum(map(int, re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{what}"))[:3])) for what in ("backgroundColor", "color")
    )
    assert (ground < ink) == (scheme == "dark")
    names = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached = page.evaluate(
            """(() => {
                const element = document.activeElement;
                if (element === document.body) return null;
                const style = getComputedStyle(element.matches('.vq-wipe') ? element.closest('.vq-stage') : element);
                const label = element.labels?.[0]?.textContent ?? element.closest('label')?.textContent;
                return [element.getAttribute('aria-label') ?? label ?? element.textContent, style.outlineStyle];
            })()"""
        )
        if reached is None:
            continue  # a list that has closed; or around
        name, outline = reached
        assert outline != "none", name
        names.add(name.strip())
    assert {"Generate", "Wipe between the two videos", "Play", "Speed", "Frame", "Show me a pair"} <= names


def test_of_gradio_only_files_can_be_had(service):
    page = service.http.get("/")
    assert page.status_code == 200
    assert "vq-comparison" in page.text
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert str(service.folder) not in page.text
    assert httpx.get(f"{service.url}/").status_code == 200  # without the token; it tells nothing
    assert "tiny" not in httpx.get(f"{service.url}/").text
    assert service.http.get("/page/page.css").headers["content-type"].startswith("text/css")
    there = [
        "/gradio_api/info",
        "/gradio_api/file=/etc/passwd",
        f"/gradio_api/file={service.config}",
        "/file=/etc/passwd",
        "/gradio_api/queue/data?session_hash=a",
    ]
    there += [
        "/config",
        "/monitoring",
        "/login_check",
        "/gradio_api/heartbeat/a",
        "/page/../ui.py",
        "/page/%2e%2e/ui.py",
        "/assets/%2e%2e/index.html",
    ]
    for path in [*there, "/static/%2e%2e/%2e%2e/%2e%2e/routes.py", "/page/..%2fui.py", "/assets//etc/passwd", "/nothing"]:
        assert service.http.get(path).status_code in (403, 404), path
    for path in ("/gradio_api/upload", "/gradio_api/queue/join", "/gradio_api/run/predict", "/gradio_api/component_server", "/gradio_api/reset"):
        assert service.http.post(path, json={}).status_code == 404, path
        assert service.http.post(path, files={"files": b"x" * 10}).status_code == 404, path
    assert service.http.post("/", json={}).status_code in (404, 405)
    assert service.http.put("/v1/videos").status_code == 405
    assert service.http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert service.http.post("/v1/videos", content=b" " * 300_000).status_code == 413
    assert httpx.get(f"{service.url}/v1/models").status_code == 401
    paths = service.http.get("/openapi.json").json()["paths"]
    assert all(path.startswith(("/v1/", "/health", "/ready", "/metrics")) for path in paths)


@pytest.mark.browser
def test_a_worker_that_is_lost(service, open_page):
    """The last test: it leaves a worker that is starting."""
    first = service.submit(compare=COMPARED, num_inference_steps=1500)
    page = open_page(f"?comparison={first['comparison_id']}")
    page.get_by_text(re.compile(r"denoising, step \d+ of 1500")).wait_for()
    os.kill(service.worker_pid(), 9)
    page.get_by_text("failed, its worker was lost").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("There is no video to show.").wait_for()
    videos = service.http.get(f"/v1/comparisons/{first['comparison_id']}").json()["videos"]
    assert [(video["status"], (video["error"] or {}).get("code")) for video in videos] == [("failed", "worker_lost"), ("cancelled", None)]
