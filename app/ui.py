"""The page: a form of Gradio's, and elements of our own (`assets/`) that show what the API answers.

The browser itself is the API's client: it asks /v1 as any other client would, with the token that its user has typed in. Nothing of the page runs in
the server, so it stays whole while the server restarts, and several servers may stand behind a balancer. Of Gradio only files can be had (`Front`).
"""

import json
from pathlib import Path

import gradio as gr
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from videoqat.models.embedded import CAPTIONS

ASSETS = Path(__file__).parent / "assets"
FOLDERS = ("/page/", "/assets/", "/static/")  # ours, and Gradio's own scripts, styles and fonts
FILES = ("/", "/theme.css", "/manifest.json", "/favicon.ico", "/robots.txt")
# A browser that obeys this asks no other server for anything, whatever a library would like to fetch.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin"}
HEAD = """<meta name="color-scheme" content="light dark">
<link rel="stylesheet" href="/page/page.css">
<script type="module" src="/page/main.js"></script>"""


def _call(function: str) -> str:
    """An event's handler: a function of assets/form.js."""
    return f"async (...values) => (await import('/page/form.js')).{function}(...values)"


def build() -> gr.Blocks:
    """The page's form, and the places of our own elements."""
    with gr.Blocks(title="videoqat", analytics_enabled=False, fill_width=True) as page:
        gr.HTML("<vq-header></vq-header>", padding=False, apply_default_css=False)
        with gr.Row(elem_id="vq-top", equal_height=False):
            with gr.Column(scale=2, min_width=300, elem_id="vq-form"):
                _form(page)
            with gr.Column(scale=5, min_width=300, elem_id="vq-result"):
                gr.HTML("<vq-comparison></vq-comparison>", padding=False, apply_default_css=False)
        gr.HTML("<vq-gallery></vq-gallery>", padding=False, apply_default_css=False)
        gr.HTML("<vq-vote></vq-vote>", padding=False, apply_default_css=False)
    return page


def _form(page: gr.Blocks) -> None:
    prompt = gr.Textbox(label="Prompt", lines=3, max_lines=8, placeholder="What the video should show", elem_id="vq-prompt")
    with gr.Row(elem_id="vq-examples"):
        for example in CAPTIONS:  # which the embedded model knows
            gr.Button(example, size="sm", min_width=0).click(None, None, prompt, js=f"() => {json.dumps(example)}")
    left = gr.Dropdown(label="Reference", elem_id="vq-left")
    right = gr.Dropdown(label="Compared with", elem_id="vq-right")
    floor = gr.Checkbox(True, label="Render the reference twice, to see how much differs by itself", elem_id="vq-floor")
    model = gr.Dropdown(label="Model", elem_id="vq-model")
    other = gr.Dropdown(label="Model of the second video", visible=False, elem_id="vq-other")
    with gr.Row():
        size = gr.Textbox(label="Size", placeholder="832x480", max_lines=1, elem_id="vq-size", min_width=130)
        frames = gr.Number(label="Frames", precision=0, minimum=1, elem_id="vq-frames", min_width=130)
    with gr.Row():
        steps = gr.Number(label="Steps", precision=0, minimum=1, elem_id="vq-steps", min_width=80)
        guidance = gr.Number(label="Guidance", minimum=0, step=0.5, elem_id="vq-guidance", min_width=80)
        seed = gr.Textbox(label="Seed", placeholder="drawn", max_lines=1, elem_id="vq-seed", min_width=80)
    negative = gr.Textbox(label="Negative prompt", lines=2, max_lines=6, elem_id="vq-negative")
    generate = gr.Button("Generate", variant="primary", elem_id="vq-generate")
    gr.HTML("<vq-notice></vq-notice>", padding=False, apply_default_css=False)

    sampling = [size, frames, steps, guidance, negative]
    page.load(None, None, [model, other, left, right, *sampling], js=_call("load"))
    model.input(None, model, [right, *sampling], js=_call("choose"))
    other.input(None, [other, model], right, js=_call("chooseOther"))
    values = [prompt, left, right, floor, model, other, size, frames, steps, guidance, seed, negative]
    gr.on([generate.click, prompt.submit], None, values, None, js=_call("generate"))


class Front:
    """Before the API: hands requests for the page's files to Gradio, and everything else on. All that Gradio could be sent, or asked for besides,
    goes on to the API, which knows no such path: no upload, no queue of Gradio's, no file from disk.

    Args:
        app: the API with its guard.
        page: Gradio's application.
    """

    def __init__(self, app: ASGIApp, page: ASGIApp) -> None:
        self.app, self.page = app, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `starlette.types.ASGIApp`."""
        wanted = scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and (scope["path"] in FILES or scope["path"].startswith(FOLDERS))
        if not wanted:
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if scope["path"].startswith("/page/"):
                    headers["Cache-Control"] = "no-cache"  # asked again with its ETag, so that an update is seen at once
            await send(message)

        await self.page(scope, receive, guarded)


def add_page(app: FastAPI) -> None:
    """Puts the page before the API, at `/`."""
    shell = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    shell.mount("/page", StaticFiles(directory=ASSETS))
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], radius_size="md", text_size="md")
    theme.set(block_border_width="0px", block_padding="0px", input_border_width="1px", button_border_width="1px")
    theme.set(block_background_fill="transparent", block_background_fill_dark="transparent")
    # Everything that Gradio would else take from the environment is said here.
    gr.mount_gradio_app(
        shell, build(), path="/", theme=theme, head=HEAD, footer_links=[], run_history=False, ssr_mode=False, pwa=False, mcp_server=False,
        enable_monitoring=False, max_file_size=1, favicon_path=str(ASSETS / "favicon.png"),
    )  # fmt: skip
    app.add_middleware(Front, page=shell)
