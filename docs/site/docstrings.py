"""griffe extension: the docstrings' reStructuredText roles as links, and their "Example:" as the section it is."""

import re

import griffe

ROLE = re.compile(r":\w+:`([^`]+)`")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
        obj.docstring.value = ROLE.sub(lambda match: _link(match[1], obj), text)


def _link(name: str, obj: griffe.Object) -> str:
    """A name of this package as a link to where the site has it, any other as code."""
    if name in obj.package.members:
        name = f"{obj.package.path}.{name}"
    elif name in obj.module.members:
        name = f"{obj.module.path}.{name}"
    return f"[`{name}`][{name}]" if name.startswith("mha_ext.") else f"`{name}`"
