"""Building blocks of the command line: registration of commands, their help, and flags that commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from planaria.common import logs
from planaria.common.errors import UserError
from planaria.config import consent, shipped

ADVANCED = "advanced"
"""panel of flags that only ``--help-all`` shows"""
RUNS = Path("runs")
SECTIONS = {
    "training": ("train", "join", "plan", "compare", "advise"),
    "runs and models": ("watch", "report", "generate", "eval", "export", "serve"),
    "recipes": ("recipes",),
    "groups of commands": ("run", "checkpoint", "experts", "swarm", "network", "lab"),
}
"""title → first words of commands, in the order of ``planaria --help``"""
GROUPS = {
    "run": "disturb or check a run",
    "checkpoint": "inspect and convert checkpoints",
    "experts": "ensembles of domain experts",
    "swarm": "peers that do not trust each other",
    "network": "links between machines",
    "lab": "demonstrations",
}
"""first word of a two-word command → description of its group"""
TABLE_VALUES = "planaria.table"
"""key of the given flags of a command's table in the context's metadata"""
SHOW_ALL = "planaria.everything"
"""key in the context's metadata if the help shows every flag"""


HELP = {"help_option_names": ["-h", "--help"]}


class Invocation(NamedTuple):
    """Properties of a command's execution, from its registration and its shared flags."""

    lasting: bool
    forks: bool
    allow_code: bool = False
    log_level: str | None = None
    log_json: bool = False


PrepareProcess = Callable[[Invocation], AbstractContextManager[None]]
"""prepares this process for a command; the object of the root context"""


class UnexpectedArgument(typer.TyperException):
    """A command line has more arguments than the command accepts."""

    def __init__(self, word: str, ctx: typer.Context) -> None:
        super().__init__(word)
        self.ctx = ctx


class TabledCommand(TyperCommand):
    """A command that can have a table of further flags, whose given values it receives as one mapping."""

    allow_extra_args = True
    keys: Mapping[str, str]
    """the library's name of a parameter → name in the table; set by :meth:`get_params`"""

    def table(self) -> Mapping[str, Any]:
        """Return name → option of the further flags."""
        return {}

    def get_params(self, ctx: Any) -> Any:
        if not hasattr(self, "keys"):
            options = self.table()
            self.keys = {f"{name.replace('.', '__')}_": name for name in options}
            self.params += _parameters({key: options[name] for key, name in self.keys.items()})
        return super().get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name: param for param in self.get_params(ctx) for name in param.opts}
        for word, following in pairwise(args):
            valued = word in options and not getattr(options[word], "is_flag", True)
            if valued and following in options and not ctx.resilient_parsing:
                raise UserError(f"{word} has no value; use {word} VALUE")
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            raise UnexpectedArgument(rest[0], ctx)
        values = {name: ctx.params.pop(key, None) for key, name in self.keys.items()}
        ctx.meta[TABLE_VALUES] = {name: text for name, text in values.items() if text is not None}
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if (title := self.section(param, ctx)) is not None and (row := self.row(param, ctx)) is not None:
                sections.setdefault(title, []).append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=36)

    def section(self, param: Any, ctx: Any) -> str | None:
        """Return the section of the help that lists a flag or argument, or None if none does."""
        if param.param_type_name == "argument":
            return "Arguments"
        panel: str | None = param.rich_help_panel
        if panel == ADVANCED:
            return "Options" if SHOW_ALL in ctx.meta else None
        return panel or "Options"

    def row(self, param: Any, ctx: Any) -> tuple[str, str] | None:
        """Return the usage of a flag or argument, and its help text."""
        record: tuple[str, str] | None = param.get_help_record(ctx)
        if record is None or param.param_type_name == "option":
            return record
        return record[0].partition(" <")[0], record[1]


class CommandGroup(TyperGroup):
    """A group of commands, which its help lists in full."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named | {"context_settings": HELP})

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        for param in params:
            param.default = False  # the library would validate None with pydantic, whose import is slow
        return params

    @property
    def summary(self) -> str:
        """The group's description and its commands."""
        return f"{self.help}: {', '.join(self.commands)}"

    def sections(self) -> Mapping[str, list[str]]:
        """Return title → commands."""
        return {"Commands": list(self.commands)}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in self.sections().items():
            listed = {name: self.commands[name] for name in names if name in self.commands}
            rows = [(name, c.summary if isinstance(c, CommandGroup) else str(c.help)) for name, c in listed.items()]
            with formatter.section(title):
                formatter.write_dl(rows)


class RootGroup(CommandGroup):
    """The group of all commands, with help by topic."""

    def sections(self) -> Mapping[str, list[str]]:
        return {title: list(names) for title, names in SECTIONS.items()}


def _make_app(cls: type[CommandGroup], label: str, **named: Any) -> typer.Typer:
    return typer.Typer(cls=cls, help=label, rich_markup_mode=None, pretty_exceptions_enable=False, **named)


app = _make_app(RootGroup, "Trains language models on machines that fail, lag and lie.", add_completion=True)
app.info.epilog = "`planaria COMMAND --help` shows a command's arguments, or a group's commands."
_groups: dict[str, typer.Typer] = {}


def command(
    name: str,
    *,
    cls: type[TabledCommand] = TabledCommand,
    code: bool = True,
    lasting: bool = False,
    forks: bool = False,
    logged: bool = False,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that registers a function as a command; the function returns the exit code.

    Its signature declares arguments and flags, its docstring is the help text. A parameter ``dict[str, str]`` receives
    the given flags of the table of ``cls``, by name.

    :param name: one word, or two, such as ``checkpoint show``.
    :param code: the command reads recipes or runs, which may name classes of modules to import.
    :param lasting: the command continues when its output is closed; implies ``logged``.
    :param forks: the command forks its workers from its own process.
    :param logged: the command has the flags of logs.
    """
    shared = (["allow_code"] if code else []) + (["log_level", "log_json"] if lasting or logged else [])

    def register(function: Callable[..., int]) -> Callable[..., int]:
        group, _, last = name.rpartition(" ")
        _group_app(group).command(last, cls=cls)(_wrap_command(function, shared, Invocation(lasting, forks)))
        return function

    return register


def program(function: Callable[..., int]) -> TabledCommand:
    """Return a function as the only command of a program, declared as in :func:`command`."""
    root = _make_app(CommandGroup, "", add_completion=False)
    root.command(cls=TabledCommand, context_settings=HELP)(
        _wrap_command(function, [], Invocation(lasting=False, forks=False))
    )
    only = get_command(root)
    assert isinstance(only, TabledCommand)
    return only


def _group_app(group: str) -> typer.Typer:
    if not group:
        return app
    if group not in _groups:
        _groups[group] = _make_app(CommandGroup, GROUPS[group])
        app.add_typer(_groups[group], name=group)
    return _groups[group]


def _wrap_command(function: Callable[..., int], shared: list[str], invocation: Invocation) -> Callable[..., int]:
    """Return a function with the parameters of ``function`` and the ``shared`` flags that prepares the process and
    calls it."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    tables = [param.name for param in parameters if param.annotation == dict[str, str]]

    def run(ctx: typer.Context, **values: Any) -> int:
        prepared: PrepareProcess = ctx.find_root().obj
        with prepared(invocation._replace(**{name: values.pop(name) for name in shared})):
            return function(**values, **dict.fromkeys(tables, ctx.meta[TABLE_VALUES]))

    declared = [param.replace(kind=param.KEYWORD_ONLY) for param in parameters if param.name not in tables]
    shared_parameters = [_keyword_parameter(name, _SHARED[name], invocation._field_defaults[name]) for name in shared]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    _set_signature(run, [context, *declared, *shared_parameters])
    run.__doc__ = function.__doc__
    return run


def _set_signature(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {param.name: param.annotation for param in parameters}


def _keyword_parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters(options: Mapping[str, Any]) -> list[Any]:
    """Return the library's parameters for the options of a table; a flag with a callback has no value."""

    def holder(**_: Any) -> None: ...

    kinds = {key: bool if option.callback else str | None for key, option in options.items()}
    _set_signature(
        holder, [_keyword_parameter(key, Annotated[kinds[key], option], None) for key, option in options.items()]
    )
    holder_app = typer.Typer(add_completion=False)
    holder_app.command()(holder)
    return get_command(holder_app).params


def _recipe_completer(kinds: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a completer for shipped recipes of these kinds (empty: any).

    The shell completes files if no recipe fits.
    """

    def complete(incomplete: str) -> list[str]:
        from planaria.config.kinds import kinds_of
        from planaria.config.recipe import read

        near = [name for name in shipped.names() if name.startswith(incomplete)]
        return [name for name in near if not kinds or {*kinds_of(read(shipped.find(name)))} & {*kinds}]

    return complete


def _complete_runs(incomplete: str) -> list[str]:
    """Complete with runs below ``runs``; the shell completes folders if no run fits."""
    near = [path for path in sorted(RUNS.glob("*")) if str(path).startswith(incomplete)]
    return [str(path) for path in near if any((path / name).is_file() for name in ("config.json", "experts.json"))]


def reject_flags(flags: Mapping[str, object], why: str) -> None:
    """Raise UserError for the first given flag (not None; a switch is True); ``why`` completes the sentence."""
    for name, given in flags.items():
        if given is not None:
            raise UserError(f"--{name}{'' if given is True else f' {given}'} {why}")


def recipe_argument(label: str = "", kinds: tuple[str, ...] = ("train",)) -> Any:
    """Return the argument of a recipe, parsed to a path; ``label`` completes its help text, the shell its ``kinds``."""
    text = f"a TOML file{label}, or a name from `planaria recipes`"
    return typer.Argument(metavar="RECIPE", parser=shipped.find, help=text, autocompletion=_recipe_completer(kinds))


def run_argument(text: str | None = None) -> Any:
    """Return the argument of a run's folder."""
    return typer.Argument(metavar="RUN", help=text, autocompletion=_complete_runs)


def run_option(name: str, text: str) -> Any:
    """Return a flag whose value is a run's folder."""
    return typer.Option(name, metavar="RUN", help=text, autocompletion=_complete_runs)


def one_folder(run: Path | None, experts: Path | None) -> Path:
    """Return the given folder of a run or an ensemble."""
    if run is not None and experts is not None:
        raise UserError(f"{run} --experts {experts}: use a run or an ensemble, not both")
    folder = run or experts
    if folder is None:
        raise UserError("name a run such as runs/demo, or pass --experts RUN")
    return folder


def flag(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """Return a flag with a value; without ``names``, it is named after its parameter."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def switch(name: str, text: str, **more: Any) -> Any:
    """Return a flag without a value."""
    return typer.Option(name, help=text, **more)


Run = Annotated[Path, run_argument()]
Experts = Annotated[Path | None, run_option("--experts", "an ensemble (`planaria experts train`) instead")]
DryRun = Annotated[bool, switch("--dry-run", "print the resolved recipe, for a run also its memory table, and stop")]
Quiet = Annotated[bool, switch("--quiet", "no progress display")]
Seed = Annotated[int, flag("SEED", "seed of random numbers")]
_LEVELS = f"{', '.join(logs.LEVELS[:-1])} or {logs.LEVELS[-1]} (default: warning here, info in workers' files)"
_CODE = "import the modules of classes that are named as module:Class; this runs their code"
_SHARED = {
    "allow_code": Annotated[bool, switch(consent.FLAG, _CODE)],
    "log_level": Annotated[Literal["debug", "info", "warning", "error"] | None, flag("LEVEL", _LEVELS, "--log-level")],
    "log_json": Annotated[bool, switch("--log-json", "write logs as JSON lines")],
}
