"""Formulas as MathML, made when the site is built.

A page writes a formula as LaTeX in a fence called ``math``, which GitHub renders too. Browsers draw MathML themselves:
no script, no font and no request is needed, a reader can select the formula, and a screen reader can speak it.
"""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from pymdownx.superfences import SuperFencesException


def on_config(config: MkDocsConfig) -> None:
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "formula", "format": as_mathml}]


def as_mathml(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    formula = convert(" ".join(source.split()), display="block")
    if "<mi>&</mi>" in formula:
        raise SuperFencesException(f"nobody knows how to align this formula; expected \\begin{{split}}:\n{source}")
    return f'<div class="{css_class}">{formula}</div>'
