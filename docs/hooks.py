"""What the site does to its pages: a link that leaves docs/ becomes the name of the file, and examples get a heading."""

import pathlib
import posixpath
import re

DOCS = pathlib.Path(__file__).parent
_LINK = re.compile(r"\[([^\]\[]+)\]\((\.\.?/[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Called by mkdocs for every page. A link to a file that does not exist stays, and is reported as broken."""
    del config, files
    folder = posixpath.dirname(page.file.src_uri)

    def plain(link: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        outside = path.startswith("../") and (DOCS / path).exists()
        return link[1] if outside else link[0]

    return _LINK.sub(plain, markdown)


def on_page_content(html: str, page, config, files) -> str:
    """Called by mkdocs for every page. ``Example::`` of a docstring, after which code is indented, gets one colon."""
    del page, config, files
    return html.replace("<p>Example::</p>", "<p>Example:</p>")
