"""Pages of the site that do not lie in docs/: README.md, and files of code that pages link to."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_CODE = re.compile(r"\]\((?:\.\./)?([\w./]+\.py)\)")


def on_files(files: Files, config) -> Files:
    """Adds README.md as the first page, and a page for each file of code."""
    pages = {"index.md": (ROOT / "README.md").read_text("utf-8")}
    texts = [
        *pages.values(),
        *(file.content_string for file in files.documentation_pages()),
    ]
    for name in sorted({name for text in texts for name in _CODE.findall(text)}):
        head = "---\nhide: [toc]\nsearch: {exclude: true}\n---\n"
        code = (ROOT / name).read_text("utf-8")
        pages[f"source/{name}.md"] = f"{head}# {name}\n\n~~~~~python\n{code}\n~~~~~\n"
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Leads links, which are relative to docs/ or to the top, to pages of the site."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    markdown = _CODE.sub(r"](source/\1.md)", markdown)
    return markdown.replace("](docs/", "](").replace("](../README.md", "](index.md")


def on_page_content(html: str, page, **_) -> str:
    """Leads links of notebooks to pages of the site."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = re.sub(r'href="\.\./([\w./]+\.py)"', r'href="source/\1.html"', html)
    return re.sub(r'href="(\w+)\.(?:md|ipynb)', r'href="\1.html', html)
