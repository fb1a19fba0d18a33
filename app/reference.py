"""/docs: every request, field and answer of the API, from its OpenAPI document, as one page that asks nobody for anything.

FastAPI's own page fetches its scripts from elsewhere, which a machine without the internet can't, and a careful one won't.
"""

import html
import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from videoqat.pages import fill

TEMPLATE = Path(__file__).with_name("reference.html.j2")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"  # data: is the empty icon
BOUNDS = {
    "minimum": "at least {:.16g}",  # FastAPI makes floats of them
    "maximum": "at most {:.16g}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "pattern": "like {}",
}


def render(document: dict[str, Any]) -> str:
    """`document` (OpenAPI) as HTML."""
    operations = [_operation(path, method, about) for path, methods in document["paths"].items() for method, about in methods.items()]
    schemas = document["components"]["schemas"]
    types = {name: (schema.get("description", ""), _fields(schema)) for name, schema in sorted(schemas.items()) if "properties" in schema}
    names = {"title": document["info"]["title"], "version": document["info"]["version"], "about": document["info"]["description"]}
    return fill(TEMPLATE.read_text(encoding="utf-8"), {**names, "operations": operations, "types": types})


def add_reference(app: FastAPI) -> None:
    """Puts the page at /docs."""

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(render(app.openapi()), headers={"Content-Security-Policy": POLICY})


def _operation(path: str, method: str, about: dict[str, Any]) -> dict[str, Any]:
    parameters = [(found["name"], type_of(found["schema"]), found.get("description", ""), found["required"]) for found in about.get("parameters", ())]
    body = about.get("requestBody", {}).get("content", {})
    return {
        "method": method.upper(),
        "path": path,
        "about": about.get("description", ""),
        "parameters": parameters,
        "body": _content(body),
        "answers": [(status, _content(found.get("content", {})), found["description"]) for status, found in sorted(about["responses"].items())],
    }


def _content(content: dict[str, Any]) -> str:
    return " or ".join(type_of(about["schema"]) if about.get("schema") else html.escape(kind) for kind, about in content.items())


def _fields(schema: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    needed = schema.get("required", ())
    return [(name, type_of(field), field.get("description", ""), name in needed) for name, field in schema["properties"].items()]


def type_of(schema: dict[str, Any]) -> str:
    """A JSON schema in words, as HTML: what is legal, with links to the types that it names."""
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        words = " or ".join(type_of(one) for one in schema["anyOf"])
    elif "enum" in schema or "const" in schema:
        words = " or ".join(html.escape(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    elif schema.get("type") == "array":
        words = f"list of {type_of(schema.get('items', {}))}"
    else:
        words = html.escape(schema.get("type", "anything"))
    bounds = [html.escape(text.format(schema[key])) for key, text in BOUNDS.items() if key in schema]
    if schema.get("default") is not None:
        bounds.append(f"{html.escape(json.dumps(schema['default']))} if not given")
    return ", ".join([words, *bounds])
