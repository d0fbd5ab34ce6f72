"""Selection of a part of planaria by name: a shipped one, a package's, or a user's class.

A recipe names a class that ships with planaria (``strategy = "echo"``), one that an installed package registers as an
entry point, or ``"module:Class"``, found on Python's path or in the working directory. The last form runs code of the
recipe's choice, so it needs permission (``config/consent.py``). A choice is a :class:`Choice`: its fields are its
options, typed and strict like all other settings. Workers find it in the same way as the controller.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import ValidationError

from planaria.common import documents
from planaria.common.errors import RunStopped, UserError, suggestion
from planaria.config import consent
from planaria.config.schema import Section
from planaria.config.section import meaning


class Choice(Section):
    """Base of everything that a recipe chooses by name. The fields of a subclass are its options."""

    former: ClassVar[Mapping[str, str]] = {}
    """name of an option in older versions → its present name"""
    former_members: ClassVar[Mapping[str, str]] = {}
    """name of a method or attribute that subclasses defined in older versions → its present name; a class from outside
    planaria that only defines the former name is rejected"""


Chosen = TypeVar("Chosen", bound=Choice)


@dataclass(frozen=True)
class Registry(Generic[Chosen]):
    """The choices of one kind."""

    kind: str
    """packages register theirs as entry points of the group ``planaria.KIND``"""
    setting: str
    """setting that names the choice, such as ``recovery.strategy``; its options are next to it, in ``options``"""
    base: type[Chosen]
    """base class of all choices"""
    shipped: Mapping[str, type[Chosen]] = field(hash=False)
    """built-in classes, by name"""
    location: str = ""
    """location of the options, if not ``options`` next to the name"""
    for_comparison: tuple[str, ...] = ()
    """built-in choices that serve comparisons only; errors list them last"""

    @property
    def names(self) -> list[str]:
        """Names of registered choices."""
        return sorted({*self.shipped, *_entry_points(self.kind)})

    def find(self, name: str) -> type[Chosen]:
        """Return the class that ``name`` chooses.

        :raises UserError: if there is no such class, it may not be imported or is unsuitable; names the setting.
        """
        if name in self.shipped:
            return self.shipped[name]
        named, registered = f"{self.setting} = {name!r}", _entry_points(self.kind)
        path = registered[name].value if name in registered else name
        if ":" not in path:
            fix = suggestion(name, self.names, self.for_comparison)
            raise UserError(f"{named}: no such choice; {fix} (or 'module:Class' for your own class)")
        module = path.partition(":")[0]
        if not all(word.isidentifier() for word in module.split(".")):
            raise UserError(f"{named}: {module!r} is not a module name; use 'module:Class', such as 'mine:Mine'")
        if path not in {point.value for point in registered.values()}:
            consent.require(module, named)
        chosen = _class(path, named)
        if not (isinstance(chosen, type) and issubclass(chosen, self.base)):
            raise UserError(f"{named} is not derived from {self.base.__module__}.{self.base.__qualname__}; derive it")
        if inspect.isabstract(chosen):
            raise UserError(f"{named} lacks {', '.join(sorted(chosen.__abstractmethods__))}; define them")
        for owner in custom_choices([chosen]):
            for former, present in chosen.former_members.items():
                if former in vars(owner) and former not in owner.model_fields and present not in vars(owner):
                    raise UserError(f"{named}: {owner.__name__}.{former} is now called {present}; rename it")
        return chosen

    def make(self, name: str, options: Mapping[str, Any]) -> Chosen:
        """Return the choice with its ``options``.

        :raises UserError: as :meth:`find`, or naming the first unknown option or invalid value.
        """
        return self.make_all([name], options)[name]

    def make_all(self, names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Chosen]:
        """Return several choices. An option applies to all that declare it; a table with a choice's name, to that one.

        :raises UserError: as :meth:`make`.
        """
        chosen = {name: self.find(name) for name in names}
        renamed = {was: option for each in chosen.values() for was, option in each.former.items()}
        options = {renamed.get(option, option): value for option, value in options.items()}
        for option in options:
            if option not in chosen and not any(option in each.model_fields for each in chosen.values()):
                declared = {option for each in chosen.values() for option in each.model_fields}
                fix = suggestion(option, declared) if declared else "there are none; remove it"
                raise UserError(f"{self._location}.{option}: no option of {', '.join(map(repr, names))}; {fix}")
        return {name: self._create(name, each, options) for name, each in chosen.items()}

    def declared(self, names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``options`` that these choices declare."""
        chosen = [self.find(name) for name in names]
        fields = {option for each in chosen for option in (*each.model_fields, *each.former)}
        return {option: value for option, value in options.items() if option in fields or option in names}

    def _create(self, name: str, chosen: type[Chosen], options: Mapping[str, Any]) -> Chosen:
        shared_options = {option: value for option, value in options.items() if option in chosen.model_fields}
        own_options = options.get(name, {})
        if not isinstance(own_options, Mapping):
            raise UserError(
                f"{self._location}.{name} = {documents.quote(own_options)} is a table of the options of {name!r}"
            )
        own_options = {chosen.former.get(option, option): value for option, value in own_options.items()}
        if unknown := next((option for option in own_options if option not in chosen.model_fields), None):
            raise UserError(f"{self._location}.{name}.{unknown}: unknown; {suggestion(unknown, chosen.model_fields)}")
        try:
            return chosen.model_validate_json(json.dumps(shared_options | dict(own_options)))
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "missing":
                option = str(first["loc"][0])
                fix = meaning(chosen, option) or "it"
                raise UserError(f"{self._location}.{option}: {name!r} has no default for it; set {fix}") from None
            raise UserError(documents.first_error(error, chosen, values=True, section=self._location)) from None
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # from a user's validator
            raise UserError(f"{self.setting} = {name!r} cannot be created: {describe_error(error)}") from error

    @property
    def _location(self) -> str:
        return self.location or f"{self.setting.rpartition('.')[0]}.options"


@lru_cache
def _entry_points(kind: str) -> Mapping[str, EntryPoint]:
    """Return entry points of installed packages; cached."""
    return {point.name: point for point in entry_points(group=f"planaria.{kind}")}


def _class(path: str, named: str) -> Any:
    """Return the class ``module:Class``."""
    module, _, name = path.partition(":")
    target: Any = _import(module, named)
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            public = [member for member in vars(target) if not member.startswith("_")]
            raise UserError(f"{named}: {module} has no {name!r}; {suggestion(name, public or ['nothing'])}")
        target = getattr(target, attribute)
    return target


def _import(module: str, named: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # last, so that nothing there replaces a library
        importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # anything that a user's module raises on import
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise UserError(f"{named}: there is no module {error.name!r} on Python's path or in {folder}") from None
        raise UserError(f"{named} cannot be imported: {describe_error(error)}") from None


def custom_choices(choices: Iterable[type[Choice]]) -> list[type[Choice]]:
    """Return the classes, and their bases, that are not planaria's own."""
    bases = {base for chosen in choices for base in chosen.__mro__ if issubclass(base, Choice)}
    custom = [base for base in bases if base.__module__.partition(".")[0] != "planaria"]
    return sorted(custom, key=lambda chosen: (chosen.__module__, chosen.__qualname__))


@contextmanager
def blame_custom_code(custom: Callable[[], Sequence[type[Choice]]]) -> Iterator[None]:
    """Run code that involves classes from outside planaria.

    :raises UserError: for unexpected errors, with the text of :func:`blame`.
    """
    try:
        yield
    except (UserError, RunStopped, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if not (named := blame(error, custom())):
            raise
        raise UserError(named) from error


def blame(error: BaseException, custom: Sequence[type[Choice]]) -> str:
    """Return the classes from outside planaria that raised ``error``, or may have caused it, and the error, or an empty
    string if there are none.
    """
    names = [f"{chosen.__module__}:{chosen.__qualname__}" for chosen in custom]
    files = [inspect.getsourcefile(chosen) for chosen in custom]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            in_file = (name for name, file in zip(names, files, strict=True) if file == frame.filename)
            return f"{', '.join(in_file)} failed: {describe_error(error, frame)}"
    return f"{', '.join(names)} may be the cause: {describe_error(error)}" if names else ""


def describe_error(error: BaseException, frame: traceback.FrameSummary | None = None) -> str:
    """Return an error as one line: location (the innermost, unless ``frame`` is set), type and message."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = frame or (frames[-1] if frames else None)
    location = "" if frame is None else f"{frame.filename}:{frame.lineno}: "
    if isinstance(error, SyntaxError):
        location = f"{error.filename}:{error.lineno}: "
    return f"{location}{type(error).__name__}: {error}".rstrip(": ")
