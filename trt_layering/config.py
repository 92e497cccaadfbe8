"""YAML deployments as typed values: which models, where they are built, in how much memory.

May import errors, shapes, units, words, the page size and the largest wave. Anything in a file that is unknown,
misspelt, of the wrong type or out of range raises ConfigError with file, line and field; nothing is guessed and nothing
is ignored.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import yaml

from trt_layering.errors import ConfigError, ModelError, UsageError
from trt_layering.runtime.footprint import MOST_WAVE
from trt_layering.shapes import ShapeRange
from trt_layering.store.manifest import PAGE
from trt_layering.units import format_seconds, format_size, parse_seconds, parse_size
from trt_layering.words import is_text, quoted

_FILE_LIMIT = 1 << 20
_PACKAGE = "package:"
_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z"
AUTO = "auto"
_EXAMPLES = "see configs/ for examples"
_PLAIN_WORDS = {
    "`object`": "a mapping",
    "`array`": "a list",
    "`str`": "text",
    "`int`": "a whole number",
    "`float`": "a number",
    "`bool`": "true or false",
    "`null`": "nothing",
    "`int | null`": "a whole number, or null",
    "`str | null`": "text, or null",
}


class Size(int):
    """Bytes, written in YAML as a number or as text such as "96MiB"."""

    def __str__(self) -> str:
        return format_size(int(self))


class ReadSize(Size):
    """Bytes of one read, whole pages as reading past the page cache needs them; 0, written "auto": what the chain's
    profile found best."""

    def __str__(self) -> str:
        return super().__str__() if self else AUTO


class Threads(int):
    """Parallel reads, 1 to 64; 0, written "auto": what the chain's profile found best."""

    def __str__(self) -> str:
        return int.__repr__(self) if self else AUTO


class Tolerance(float):
    """A part of something, 0 to 1. YAML takes 1e-3 for text, which we do not."""


class BlockSize(Size):
    """Bytes of a block, or "auto": by the model's size, here 0."""

    def __str__(self) -> str:
        return super().__str__() if self else AUTO


class Share(Size):
    """A model's part of the budget, or "auto": what dividing it gives, here 0."""

    def __str__(self) -> str:
        return super().__str__() if self else AUTO


class Duration(float):
    """Seconds, written in YAML as text such as "100ms"."""

    def __str__(self) -> str:
        return format_seconds(float(self))


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Loader(_Section, frozen=True):
    """How weights are read: see LoaderOptions of the runtime, which these become."""

    direct_io: Literal["auto", "always", "never"] = "auto"
    threads: Threads = Threads(0)
    read_size: ReadSize = ReadSize(0)
    verify: Literal["first", "always", "never"] = "first"


class Model(_Section, frozen=True):
    """One model: where its ONNX file is, how its chain is built, and what it gets of what models share.

    `onnx` is a path, or `package:ddddocr/common.onnx` for a file inside an installed package. `binding` and `placement`
    are TensorRT's: how engines get their weights, and through which memory these come. `share`, `priority` and
    `deadline` are for `sharing.division`; `wave` is the most requests that the service executes together.
    """

    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    onnx: str
    backend: Literal["auto", "onnxruntime", "tensorrt"] = "auto"
    precision: Literal["fp32", "fp16"] = "fp32"
    binding: Literal["auto", "inputs", "refit", "swap"] = "auto"
    placement: Literal["auto", "staged", "zero-copy", "managed"] = "auto"
    weights: Literal["fp32", "fp16", "bf16"] = "fp32"
    weights_tolerance: Tolerance | None = None
    block_size: BlockSize = BlockSize(0)
    shapes: dict[str, ShapeRange] = msgspec.field(default_factory=dict)
    optimise: bool = True
    split: bool = True
    build_memory: Size = Size(1 << 30)
    share: Share = Share(0)
    priority: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    deadline: Duration | None = None
    wave: Annotated[int, msgspec.Meta(ge=1, le=MOST_WAVE)] = 4

    def for_build(self) -> dict[str, Any]:
        """The arguments that `build` takes, all but the repository. ModelError for a package's file that is not
        installed."""
        return {
            "model": resolve_model(self.onnx), "name": self.name, "backend": self.backend,
            "precision": self.precision, "binding": self.binding, "placement": self.placement,
            "block_size": int(self.block_size) or AUTO,
            "shapes": {name: shape.for_build() for name, shape in self.shapes.items()},
            "optimise": self.optimise, "split": self.split, "memory": int(self.build_memory),
            "weights": self.weights, "weights_tolerance": self.weights_tolerance,
        }  # fmt: skip


_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Service(_Section, frozen=True):
    """What `serve` listens on and what it allows: requests that wait for a model, bytes of a body, how long a request
    may take, and how long those under way have when it ends. Port 0 is any that is free; no `metrics_port`, no metrics.
    Where `host` is no loopback address, `token_file` is a must.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: _Port = 8000
    metrics_port: _Port | None = 8002
    max_queue: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 64
    max_body: Size = Size(64 << 20)
    request_timeout: Duration = Duration(60)
    drain: Duration = Duration(20)
    token_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None


class Deployment(_Section, frozen=True):
    """A whole file. Relative paths count from the folder in which the command runs."""

    repository: str = "engines"
    memory_budget: Size | None = None
    loader: Loader = msgspec.field(default_factory=Loader)
    service: Service = msgspec.field(default_factory=Service)
    models: tuple[Model, ...] = ()


@dataclass(frozen=True)
class Setting:
    """One setting, its value as text, and where it came from: `file:line` or "default"."""

    field: str
    value: str
    origin: str


@dataclass(frozen=True)
class Config:
    """A deployment that was read from `path`; `lines` has the line of each field that stands in the file."""

    path: Path
    deployment: Deployment
    lines: Mapping[str, int] = field(repr=False)

    def model(self, name: str | None) -> Model:
        """The model called `name`, or the only one there is. ConfigError otherwise."""
        models = {model.name: model for model in self.deployment.models}
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        if name is None:
            raise ConfigError(
                f"{self.path} has {len(models)} models and none was chosen",
                where=str(self.path),
                remedy=f"choose one with --name: {', '.join(models)}" if models else "add one under models:",
            )
        if name not in models:
            raise ConfigError(
                f"{self.path} has no model {name!r}", where=str(self.path), remedy=_did_you_mean(name, models)
            )
        return models[name]

    def settings(self) -> list[Setting]:
        """Every setting of the deployment, in the file's vocabulary, each with where it came from."""
        return list(self._walk(self.deployment, ""))

    def _walk(self, value: object, path: str) -> list[Setting]:
        if isinstance(value, msgspec.Struct):
            parts = [(f"{path}.{key}".lstrip("."), getattr(value, key)) for key in value.__struct_fields__]
        elif isinstance(value, dict) and value:
            parts = [(f"{path}.{key}", part) for key, part in value.items()]
        elif isinstance(value, tuple) and value:
            parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
        else:
            line = self.lines.get(path)
            origin = "default" if line is None else f"{self.path}:{line}"
            return [Setting(path, _words(value), origin)]
        return [setting for part_path, part in parts for setting in self._walk(part, part_path)]


def load(path: Path | str) -> Config:
    """The deployment in the YAML file `path`. ConfigError with file, line and field for anything wrong in it."""
    path = Path(path)
    document = _Document.read(path)
    try:
        deployment = msgspec.convert(document.data, Deployment, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise document.explain(str(error)) from None
    names = [model.name for model in deployment.models]
    for index, name in enumerate(names):
        if name in names[:index]:
            place = f"models[{index}].name"
            raise document.error(f"two models are called {name!r}", place, "give each model a name of its own")
    service = deployment.service
    if service.port and service.port == service.metrics_port:
        what = f"the service and its metrics have the same port, {service.port}"
        raise document.error(what, "service.metrics_port", "give each a port of its own")
    return Config(path, deployment, document.lines)


def resolve_model(onnx: str) -> Path:
    """The file that a model's `onnx` means: a path, or `package:FOLDER/FILE` below any folder on Python's path.

    A path is returned as it is, whether or not it exists. ModelError if the package's file is not installed.
    """
    if not onnx.startswith(_PACKAGE):
        return Path(onnx)
    relative = onnx[len(_PACKAGE) :]
    for entry in sys.path:
        candidate = Path(entry) / relative
        if candidate.is_file():
            return candidate
    raise ModelError(
        f"no installed package has the file {relative}",
        where=onnx,
        remedy="install the package that holds it, or name the ONNX file by its path",
    )


def _decode(kind: type, value: object) -> object:
    """msgspec's hook for our own types; it adds the field to a ValueError, so that is what it gets."""
    if kind is Threads:
        return _threads(value)
    try:
        if kind is Duration:
            return Duration(parse_seconds(value))  # type: ignore[arg-type]
        if issubclass(kind, Size) and isinstance(value, (int, str)):
            return _sized(kind, value)
        if kind is Tolerance and isinstance(value, (int, float, str)):
            return _tolerance(value)
        if kind is ShapeRange:
            return ShapeRange.parse(value)
    except UsageError as error:
        raise ValueError(f"{error.what}; {error.remedy}") from None
    raise ValueError(f"Expected a size, got {quoted(value)}; write it like 96MiB, or as bytes")


def _sized(kind: type[Size], value: int | str) -> Size:
    if kind in (ReadSize, BlockSize, Share) and value == AUTO:
        return kind(0)
    size = kind(parse_size(value))
    if kind is ReadSize and size % PAGE:
        raise UsageError(f"{quoted(value)} is no multiple of {PAGE} bytes", remedy="write it like 4MiB")
    return size


def _threads(value: object) -> Threads:
    if value == AUTO:
        return Threads(0)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 64:
        return Threads(value)
    raise ValueError(f"Expected 1 to 64 parallel reads, or auto, got {quoted(value)}")


def _tolerance(value: float | str) -> Tolerance:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if isinstance(value, bool) or not 0 <= number <= 1:
        raise UsageError(f"{quoted(value)} is no part of something", remedy="write a number from 0 to 1, like 0.001")
    return Tolerance(number)


def _words(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if type(value) is float:
        return f"{value:g}"
    return str(value) if value not in ((), {}) else "none"


def _did_you_mean(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known here: {', '.join(known)}" if known else ""


class _Loader(yaml.SafeLoader):
    """Whatever PyYAML raises where a value is not of its type becomes the error that has its line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            problem = f"{quoted(node.value)} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from error


@dataclass(frozen=True)
class _Document:
    """One YAML document as plain values, and the line of every field: `models[0].block_size` → 7."""

    path: Path
    data: object
    lines: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> _Document:
        try:
            return cls._parse(path, _read_text(path))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            where = f"{path}:{mark.line + 1}" if mark else str(path)
            problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not readable"
            raise ConfigError(f"not valid YAML: {problem}", where=where, remedy="mend that line") from None
        except RecursionError:
            raise ConfigError("not valid YAML: nested too deeply", where=str(path), remedy=_EXAMPLES) from None

    @classmethod
    def _parse(cls, path: Path, text: str) -> _Document:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        except (OverflowError, ValueError):  # an escape such as "\\UFFFFFFFF"
            where = f"{path}:{loader.line + 1}"
            raise ConfigError("not valid YAML: no such character", where=where, remedy="mend that line") from None
        if node is None:
            raise ConfigError("the file has no settings in it", where=str(path), remedy=_EXAMPLES)
        if _written_out(node, {}) > _FILE_LIMIT:
            what = "a configuration of over 1 MiB, with what its aliases stand for"
            raise ConfigError(what, where=str(path), remedy="write it with fewer aliases")
        lines: dict[str, int] = {}
        _index(path, node, "", lines, set())
        return cls(path, loader.construct_document(node), lines)

    def error(self, what: str, place: str, remedy: str) -> ConfigError:
        """A ConfigError at the field `place`, or at the innermost field around it that stands in the file."""
        around = place
        while around and around not in self.lines:
            around = re.sub(r"(\.?[^.\[\]]+|\[[^\]]*\])$", "", around)
        line = self.lines.get(around, self.lines.get("", 1))
        return ConfigError(what, where=f"{self.path}:{line}: {place or 'the whole file'}", remedy=remedy)

    def explain(self, message: str) -> ConfigError:
        """msgspec's message as one of ours: "Expected `int`, got `str` - at `$.models[0].threads`" and its like."""
        what, _, tail = message.partition(" - at `$")
        place = tail.rstrip("`").lstrip(".")
        unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
        if unknown:
            fields = _section_at(place).__struct_fields__
            inner = f"{place}.{unknown[1]}".lstrip(".")
            return self.error(f"unknown key {unknown[1]!r}", inner, _did_you_mean(unknown[1], fields))
        missing = re.fullmatch(r"Object missing required field `(.*)`", what)
        if missing:
            return self.error(f"{missing[1]!r} is missing", place, f"add {missing[1]}: …")
        if place.endswith(".shapes[...]"):
            place = self._bad_shape(place.removesuffix("[...]"))
        what, _, remedy = what.partition("; ")
        choices = _choices_at(place)
        if choices:
            remedy = f"choose one of {', '.join(choices)}"
        if "matching regex" in what:
            what = "a name has letters, digits, '.', '_' and '-', 128 at most, and no '.' in front"
        for word, plain in _PLAIN_WORDS.items():
            what = what.replace(word, plain)
        return self.error(what, place, remedy or _EXAMPLES)

    def _bad_shape(self, place: str) -> str:
        """msgspec does not say which key of a dict was wrong: the first that does not parse."""
        index = int(re.findall(r"\[(\d+)\]", place)[0])
        shapes = self.data["models"][index]["shapes"]  # type: ignore[index]
        for key, value in shapes.items():
            try:
                ShapeRange.parse(value)
            except UsageError:
                return f"{place}.{key}"
        return place


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _FILE_LIMIT:
            raise ConfigError("a configuration of over 1 MiB", where=str(path), remedy="name a YAML deployment")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        what = f"cannot read the configuration: {error.strerror}"
        raise ConfigError(what, where=str(path), remedy="name a YAML file that exists") from None
    except UnicodeDecodeError:
        what = "the configuration is not text in UTF-8"
        raise ConfigError(what, where=str(path), remedy="name a YAML file") from None


def _written_out(node: yaml.Node, known: dict[int, float]) -> float:
    """About how many characters `node` has once every alias in it is written out; no end where it holds itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        if isinstance(node, yaml.ScalarNode):
            known[id(node)] = 1.0 + len(node.value)
        else:
            pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
            known[id(node)] = sum((_written_out(part, known) for parts in pairs for part in parts), 1.0)
    return known[id(node)]


def _index(path: Path, node: yaml.Node, place: str, lines: dict[str, int], seen: set[int]) -> None:
    """Fills `lines`; refuses text that no name and no path can have, and a key that is written twice, of which YAML
    would silently keep the last."""
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode) and not is_text(node.value):
        what, where = f"no text in UTF-8: {quoted(node.value)}", f"{path}:{node.start_mark.line + 1}"
        raise ConfigError(what, where=where, remedy="write other characters")
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, part in enumerate(node.value):
            _index(path, part, f"{place}[{index}]", lines, seen)
    if isinstance(node, yaml.MappingNode):
        first: dict[Hashable, int] = {}
        for key, part in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError("a key that is no word", where=f"{path}:{line}", remedy="write it as key: value")
            inner = f"{place}.{key.value}".lstrip(".")
            _index(path, key, place, lines, seen)
            if key.value in first:
                what = f"{quoted(key.value)} is written twice, first on line {first[key.value]}"
                raise ConfigError(what, where=f"{path}:{line}: {inner}", remedy="keep one of them")
            first[key.value] = lines[inner] = line
            _index(path, part, inner, lines, seen)


def _section_at(place: str) -> type[_Section]:
    if place in ("loader", "service"):
        return Loader if place == "loader" else Service
    return Model if place.startswith("models") else Deployment


def _choices_at(place: str) -> tuple[str, ...]:
    """The words allowed at a field, empty where it is not one of a few."""
    section, _, name = place.rpartition(".")
    hint: Any = get_type_hints(_section_at(section)).get(name)
    return tuple(word for word in get_args(hint) if isinstance(word, str))
