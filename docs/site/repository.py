"""mkdocs hook: the site's pages lie where the repository's files do, so that their relative links hold in both.

Pages are the Markdown files of docs/ and those beside the sources. What else they link to comes along: a picture as it
is, a source file as a page that shows it, a folder as a list of its files.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**/*.md",
    "csrc/**/*.md",
    "benchmarks/*.md",
    "tests/*/*.md",
)
AS_IT_IS = {".md", ".png", ".css"}
LANGUAGES = {".py": "python", ".json": "json", ".sh": "bash", **dict.fromkeys((".h", ".inl", ".cpp", ".cuh"), "cpp")}
LINK = re.compile(r"\]\(([^)#\s]+)|^\[[^]]+\]: ([^#\s]+)", re.M)


class SourceFile(File):
    """A file that is shown as a page under its own name, with its ending."""

    def is_documentation_page(self) -> bool:
        return True

    @property
    def dest_uri(self) -> str:
        return f"{self.src_uri}/index.html"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    pages = sorted({path for pattern in PAGES for path in root.glob(pattern)})
    linked = {target for page in pages for target in _linked(page)}
    linked |= {member for folder in linked if folder.is_dir() for member in _members(folder)}
    theme = [file for file in files if file.src_dir != config.docs_dir]
    styles = Path(__file__).parent.glob("*.css")
    return Files(theme + [_file(path, root, config) for path in [*pages, *sorted(linked - set(pages)), *styles]])


def _linked(page: Path) -> list[Path]:
    """The files and folders that a page links to; where one is missing, mkdocs says so."""
    targets = (first or second for first, second in LINK.findall(page.read_text()))
    paths = ((page.parent / target).resolve() for target in targets if "://" not in target)
    return [path for path in paths if path.exists()]


def _members(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in LANGUAGES)


def _file(path: Path, root: Path, config: MkDocsConfig) -> File:
    name = path.relative_to(root).as_posix()
    if path.suffix in AS_IT_IS:
        return File(name, str(root), config.site_dir, config.use_directory_urls)
    return SourceFile.generated(config, name, content=_shown(path, name), inclusion=InclusionLevel.NOT_IN_NAV)


def _shown(path: Path, name: str) -> str:
    head = f"---\ntitle: {name}\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n"
    if path.is_dir():
        return head + "\n".join(f"- [{member.name}]({path.name}/{member.name})" for member in _members(path))
    return f"{head}````{LANGUAGES.get(path.suffix, '')}\n{path.read_text()}\n````\n"
