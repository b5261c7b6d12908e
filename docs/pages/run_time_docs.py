"""What the API pages show of functions whose signature and docstring are made when memonger is imported, and links."""

import inspect
import re
from typing import Any

import griffe

import memonger

PUBLIC = re.compile(rf"(?<!`)`((?:memonger\.)?({'|'.join(memonger.__all__)}))`(?!`)")
"""A public name in single quotes, as docstrings write it."""

ATTRIBUTES = re.compile(r"^Attributes:\n((?:[ ].*\n?)+)", re.MULTILINE)
_HOMES = {f"{made.__module__}.{made.__qualname__}" for made in (memonger.Plan, memonger.GraphPlan)}


class RunTimeDocs(griffe.Extension):
    """Shows functions under `takes_options` as ``help()`` does, with every option; links public names in docstrings."""

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Parameters and docstring of a decorated function, from the imported package; types from the source."""
        if any(str(decorator.value).startswith("takes_options") for decorator in func.decorators):
            made = getattr(memonger, func.name)
            fields = loader.modules_collection["memonger.options.Options"].attributes
            own = {parameter.name: parameter for parameter in func.parameters}
            options = [each for each in inspect.signature(made).parameters.values() if each.name not in own]
            func.parameters = griffe.Parameters(
                *(each for each in own.values() if each.kind is not griffe.ParameterKind.var_keyword),
                *(_parameter(each, fields[each.name].annotation) for each in options),
            )
            func.overloads = None
            func.docstring = griffe.Docstring(_linked(made.__doc__ or ""), parent=func)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """A public class lists the attributes its bases describe, too."""
        if cls.docstring and cls.path in _HOMES:
            described = [c.docstring.value for c in [cls, *cls.mro()] if isinstance(c, griffe.Class) and c.docstring]
            blocks = [found[1].rstrip() for found in map(ATTRIBUTES.search, map(inspect.cleandoc, described)) if found]
            text = ATTRIBUTES.sub("", inspect.cleandoc(cls.docstring.value)).rstrip()
            cls.docstring.value = "\n\n".join([text, "Attributes:\n" + "\n".join(blocks)]) if blocks else text

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Public names in a docstring become links to where they are described."""
        if obj.docstring:
            obj.docstring.value = _linked(obj.docstring.value)


def _linked(docstring: str) -> str:
    return PUBLIC.sub(r"[`\1`][memonger.\2]", inspect.cleandoc(docstring))


def _parameter(option: inspect.Parameter, annotation: str | griffe.Expr | None) -> griffe.Parameter:
    kind, value = type(option.default), option.default
    default = f"{kind.__name__}()" if kind.__module__.startswith("memonger") else repr(value)
    return griffe.Parameter(option.name, annotation=annotation, kind=griffe.ParameterKind.keyword_only, default=default)
