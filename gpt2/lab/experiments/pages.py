"""Report pages: templates, and HTML files that do not need a network."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markdown_it import MarkdownIt

from gpt2.utils.files import write_text
from gpt2.utils.text import counted

_LAB = Path(__file__).parents[1]


def render(template: str, **context: object) -> str:
    """Fill a Jinja template with the variables `context`, and return the text.

    `template` is the path of the template, relative to gpt2/lab. If the path ends in .html.j2, the
    values of variables are escaped.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_LAB),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["counted"] = counted
    return environment.get_template(template).render(context)


def write_markdown(root: Path, title: str, text: str, pictures: Sequence[str]) -> None:
    """Write a Markdown report to `root`/report.md, and the same report to `root`/report.html.

    `pictures` are the names of the images in `root` that the report shows. report.html contains
    them.
    """
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    write_text(root / "report.md", text)
    write_page(root, title, MarkdownIt("js-default").render(text), pictures)


def write_page(root: Path, title: str, body: str, pictures: Sequence[str]) -> None:
    """Write `root`/report.html with the HTML `body`. The file needs no other file.

    `pictures` are the names of the images in `root` that `body` shows. report.html contains them.
    """
    for name in pictures:
        data = base64.b64encode((root / name).read_bytes()).decode()
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{data}"')
    page = render("experiments/page.html.j2", title=title, body=body)
    write_text(root / "report.html", page)
