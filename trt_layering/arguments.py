"""The words of the command line: which flags there are, and what they and a YAML deployment say together.

May import config, errors, shapes, terminal, units and words. A flag wins over the file, the file over the default. What
makes no sense raises UsageError; the parser exits by itself only after --help and --version.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trt_layering.errors import UsageError
from trt_layering.shapes import Shape, ShapeRange, parse_named
from trt_layering.terminal import Result
from trt_layering.units import parse_rate, parse_size
from trt_layering.words import is_text, quoted

if TYPE_CHECKING:
    from trt_layering.config import BlockSize, Config, Model
    from trt_layering.inputs import Pixels

Verb = Callable[[argparse.Namespace], Result]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"{self.prog} --help tells more")


def parsed(words: Sequence[str], verbs: Mapping[str, Verb]) -> argparse.Namespace:
    """The whole command line; `verb` of what is returned is one of `verbs`. UsageError for what makes no sense."""
    for word in words:
        if not is_text(word):
            raise UsageError(f"{quoted(word)} is not UTF-8", remedy="rename it, or link to it by another name")
    return _parser(verbs).parse_args(words)


def _parser(verbs: Mapping[str, Verb]) -> argparse.ArgumentParser:
    whole = _Parser(
        prog="trt-layering",
        description="Runs ONNX models in less memory than their weights, by streaming them from disk.",
        epilog="Exit status: 0 done, 1 failed, 2 usage or configuration, 3 does not fit the budget, 4 store corrupt or "
        "built for something else, 130 interrupted. Relative paths count from the current folder.",
    )
    whole.add_argument("--version", action="version", version=_version())
    added = whole.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, words, add in (
        ("build", "cut a model into blocks and store them with their weights", _add_build),
        ("run", "run a built chain on given or random inputs", _add_run),
        ("verify", "compare a built chain with the uncut model on seeded inputs", _add_verify),
        ("schedule", "say what a budget buys, of a chain or divided among models, before anything runs", _add_schedule),
        ("bench", "measure a built chain at many budgets, beside plain ONNX Runtime", _add_bench),
        ("inspect", "say what is in a built chain, a block's engine file or a TensorRT plan", _add_inspect),
        ("profile", "measure a built chain and its drive again, and keep what was found", _add_profile),
        ("doctor", "say what this machine has, and what that means for chains", _add_doctor),
    ):
        words_of_its_own = f"{words[0].upper()}{words[1:]}."
        verb = added.add_parser(name, help=words, description=words_of_its_own, allow_abbrev=False)
        verb.set_defaults(verb=verbs[name])
        verb.add_argument("--json", action="store_true", help="one JSON object on stdout, everything else on stderr")
        add(verb)
    return whole


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"trt-layering {version('trt-layering')}"
    except PackageNotFoundError:
        return "trt-layering, not installed"


def _add_repository(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repository", metavar="FOLDER", help="where built chains are (default: engines)")


def _add_chain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="NAME|CONFIG.yaml", help="a built chain, or a deployment that has it")
    parser.add_argument("--name", metavar="N", help="which model of CONFIG.yaml, where it has several")
    _add_repository(parser)
    parser.add_argument("--chain-version", type=int, metavar="V", help="which version (default: the newest)")
    parser.add_argument("--budget", metavar="SIZE", help="memory for weights, activations and scratch, like 96MiB")


def _add_shape(parser: argparse.ArgumentParser, names: Sequence[str], words: str) -> None:
    parser.add_argument(*names, action="append", default=[], metavar="X:1x3x224x224", help=words)


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL.onnx|CONFIG.yaml", help="a model, or a deployment of models")
    parser.add_argument("--name", metavar="N", help="the chain's name (default: the file's); or which of CONFIG.yaml")
    words = "only those of CONFIG.yaml that are not up to date; one that fails does not stop the others"
    parser.add_argument("--all", action="store_true", help=words)
    _add_repository(parser)
    words = "what executes blocks (default: auto: tensorrt where it can be used, else onnxruntime)"
    parser.add_argument("--backend", choices=("auto", "onnxruntime", "tensorrt"), help=words)
    words = "what is computed in; fp16 is for tensorrt (default: fp32)"
    parser.add_argument("--precision", choices=("fp32", "fp16"), help=words)
    words = "how TensorRT engines get their weights (default: auto: the fastest that answers rightly)"
    parser.add_argument("--binding", choices=("auto", "inputs", "refit", "swap"), help=words)
    words = "the memory through which weights come to the GPU (default: auto: what is measured to be fastest)"
    parser.add_argument("--placement", choices=("auto", "staged", "zero-copy", "managed"), help=words)
    parser.add_argument(
        "--weights", choices=("fp32", "fp16", "bf16"), help="how weights of float32 are stored (default: fp32)"
    )
    words = "how much that may change an output of a block, as a part of its largest value (default: 1e-3; bf16: 1e-2)"
    parser.add_argument("--weights-tolerance", type=float, metavar="T", help=words)
    parser.add_argument("--block-size", metavar="SIZE", help="how large a block may be (default: auto, by the model)")
    parser.add_argument("--memory", metavar="SIZE", help="what the build may take itself (default: 1GiB)")
    parser.add_argument("--no-optimise", action="store_true", help="bit-identical to the model as it is, but slower")
    parser.add_argument("--no-split", action="store_true", help="keep weights larger than a block whole")
    _add_shape(parser, ("--shape", "--shapes"), "the shape of an input; several times for several")
    for end in ("min", "opt", "max"):
        names = (f"--{end}-shape", f"--{end}-shapes", f"--{end}Shapes")
        _add_shape(parser, names, f"the {end} of a shape that varies")


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", action="append", default=[], metavar="X=FILE", help=".npy, .npz or an image")
    words = "images: (pixel/255 - mean)/std; one number, or one a channel (default: 0)"
    parser.add_argument("--mean", default="0", metavar="M", help=words)
    parser.add_argument("--std", default="1", metavar="S", help="see --mean; like 0.229,0.224,0.225 (default: 1)")
    _add_shape(parser, ("--shape", "--shapes"), "of random inputs, and of images where the model leaves it open")
    parser.add_argument("--seed", type=_natural, default=0, help="of random inputs (default: 0)")


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_chain(parser)
    _add_inputs(parser)
    parser.add_argument("--output", metavar="FILE", help="write the outputs to a .npz (all) or .npy (the only one)")
    parser.add_argument("--iterations", type=int, metavar="N", help="how often to run (default: 1, or one wave)")
    words = "run in waves of up to 64 requests, each with random inputs of its own: weights are read once a wave"
    parser.add_argument("--wave", type=int, metavar="N", help=words)
    words = "write what was read, waited for and executed when, for ui.perfetto.dev"
    parser.add_argument("--trace", metavar="FILE.json", help=words)
    parser.add_argument("--direct-io", choices=("auto", "always", "never"), help="past the page cache (default: auto)")
    parser.add_argument(
        "--loader-threads", type=int, metavar="N", help="parallel reads (default: what the profile found)"
    )
    parser.add_argument("--read-size", metavar="SIZE", help="of one read (default: what the profile found)")
    parser.add_argument("--checksums", choices=("first", "always", "never"), help="when to check them (default: first)")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_chain(parser)
    parser.add_argument("--onnx", metavar="MODEL.onnx", help="the uncut model (CONFIG.yaml has it already)")
    words = (
        "largest difference of an output that passes, as a part of its largest value; 0: bit for bit "
        "(default: what the build allowed: 1e-5, with --no-optimise 0, or 1e-6 where weights were "
        "split; with --weights fp16 1e-2, bf16 5e-2; of TensorRT 1e-3, with --precision fp16 5e-2)"
    )
    parser.add_argument("--tolerance", type=float, metavar="T", help=words)
    _add_inputs(parser)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    _add_chain(parser)
    parser.add_argument("--read-rate", metavar="RATE", help="as if the drive read so fast, like 2GB (a second)")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="NAME|CONFIG.yaml", help="a built chain, or a deployment that has it")
    parser.add_argument("--name", metavar="N", help="which model of CONFIG.yaml, where it has several")
    _add_repository(parser)
    parser.add_argument("--chain-version", type=int, metavar="V", help="which version (default: the newest)")
    parser.add_argument("--onnx", metavar="MODEL.onnx", help="the uncut model (CONFIG.yaml has it already)")
    words = "like 32MiB,64MiB (default: about eight, from the floor to everything)"
    parser.add_argument("--budgets", metavar="SIZES", help=words)
    words = "what to compare with: sequential, double, mapped, memory, resident (default: all that can be had)"
    parser.add_argument("--against", metavar="WHAT,…", help=words)
    words = "runs of each in a turn, fewer where they are slow (default: 10)"
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help=words)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each at a budget (default: 3)")
    words = "write bench.json and the pictures curve and timeline, .svg and .png, into this folder"
    parser.add_argument("--output", metavar="FOLDER", help=words)
    parser.add_argument("--plot", metavar="FILE", help="write the curve to this .svg or .png")
    _add_shape(parser, ("--shape", "--shapes"), "of the random inputs (default: those of the build)")
    parser.add_argument("--seed", type=_natural, default=0, help="of random inputs (default: 0)")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="NAME|FILE", help="a built chain, its folder, or one of its files")
    _add_repository(parser)
    parser.add_argument("--chain-version", type=int, metavar="V", help="which version (default: the newest)")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="NAME", help="a built chain")
    _add_repository(parser)
    parser.add_argument("--chain-version", type=int, metavar="V", help="which version (default: the newest)")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", metavar="CONFIG.yaml", help="show its settings too, and where each is from"
    )
    _add_repository(parser)


def models_to_build(options: argparse.Namespace) -> tuple[str, list[Model]]:
    """The repository and the models that `build` was asked for; ConfigError if a deployment has none."""
    from trt_layering.config import Model

    config = config_of(options.target)
    if options.all and (config is None or options.name is not None):
        raise UsageError("--all is for every model of CONFIG.yaml", remedy="leave it out, or name a deployment alone")
    if config is None:
        name = options.name or re.sub(r"[^A-Za-z0-9._-]", "-", Path(options.target).stem).lstrip(".") or "model"
        return options.repository or "engines", [_with_flags(Model(name=name, onnx=options.target), options)]
    deployment = config.deployment
    models = [config.model(options.name)] if options.name or not deployment.models else list(deployment.models)
    return options.repository or deployment.repository, [_with_flags(model, options) for model in models]


def _with_flags(model: Model, options: argparse.Namespace) -> Model:
    """`model` with what the command line says instead."""
    import msgspec

    from trt_layering.config import Size

    said: dict[str, Any] = {
        "backend": options.backend,
        "precision": options.precision,
        "binding": options.binding,
        "placement": options.placement,
        "weights": options.weights,
        "weights_tolerance": options.weights_tolerance,
        "block_size": _block_size(options.block_size),
        "build_memory": _size(options.memory, "--memory", Size),
        "optimise": False if options.no_optimise else None,
        "split": False if options.no_split else None,
        "shapes": {**model.shapes, **_shape_ranges(options)},
    }
    return msgspec.structs.replace(model, **{key: value for key, value in said.items() if value is not None})


def _shape_ranges(options: argparse.Namespace) -> dict[str, ShapeRange]:
    fixed, least, usual, most = (
        shapes(texts) for texts in (options.shape, options.min_shape, options.opt_shape, options.max_shape)
    )
    ranges = {name: ShapeRange(shape, shape, shape) for name, shape in fixed.items()}
    for name in {**least, **usual, **most}:
        if name in ranges or name not in least or name not in most:
            remedy = "give --min-shape and --max-shape (and --opt-shape), or only --shape"
            raise UsageError(f"the shape of {name!r} is given in a way that does not fit together", remedy=remedy)
        ranges[name] = ShapeRange(least[name], usual.get(name, most[name]), most[name]).checked()
    return ranges


def shapes(texts: Sequence[str]) -> dict[str, Shape]:
    """The shapes by input name of a flag that was given `texts`; UsageError for one given twice."""
    named: dict[str, Shape] = {}
    for text in texts:
        for name, shape in parse_named(text).items():
            if name in named:
                raise UsageError(f"the shape of {name!r} is given twice", remedy="give it once")
            named[name] = shape
    return named


@dataclass(frozen=True)
class Target:
    """The chain a verb works on, and the flags and settings that say how. `divided` is the deployment of whose budget
    the chain gets a share, unless a flag gives a budget."""

    name: str
    repository: str
    version: int | None
    budget: int | None
    onnx: str | None
    loader: dict[str, Any]
    divided: Config | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Target:
        """From the arguments of `_add_chain`; ConfigError if a deployment has no such model."""
        config = config_of(options.target)
        granted = budget(options)
        if config is None:
            if options.name is not None:
                raise UsageError("--name chooses a model of CONFIG.yaml, and none was given", remedy="leave it out")
            repository = options.repository or "engines"
            return cls(options.target, repository, options.chain_version, granted, None, {})
        model, deployment = config.model(options.name), config.deployment
        whole = deployment.memory_budget
        loader = {key: getattr(deployment.loader, key) for key in deployment.loader.__struct_fields__}
        loader |= {key: int(loader[key]) or "auto" for key in ("threads", "read_size")}
        return cls(
            model.name,
            options.repository or deployment.repository,
            options.chain_version,
            granted if granted is not None or whole is None else int(whole),
            model.onnx,
            loader,
            config if granted is None and (model.share or len(deployment.models) > 1) else None,
        )


def budget(options: argparse.Namespace) -> int | None:
    """The bytes of --budget."""
    return _size(getattr(options, "budget", None), "--budget", int)


def read_rate(options: argparse.Namespace) -> float | None:
    """The bytes per second of --read-rate."""
    return None if options.read_rate is None else parse_rate(options.read_rate, what="--read-rate")


def loader_flags(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of LoaderOptions that flags give."""
    said = {
        "direct_io": options.direct_io,
        "threads": options.loader_threads,
        "read_size": _size(options.read_size, "--read-size", int),
        "verify": options.checksums,
    }
    return {key: value for key, value in said.items() if value is not None}


def pixels(options: argparse.Namespace) -> Pixels:
    """How images become numbers, from --mean and --std."""
    from trt_layering.inputs import Pixels

    try:
        mean, std = (tuple(float(part) for part in text.split(",")) for text in (options.mean, options.std))
    except ValueError:
        raise UsageError("--mean and --std are numbers", remedy="like 0.5, or 0.485,0.456,0.406") from None
    if not all(part > 0 for part in std):
        raise UsageError("--std must be above zero", remedy="like 0.5, or 0.229,0.224,0.225")
    return Pixels(mean, std)


def config_of(target: str) -> Config | None:
    """The deployment, if `target` is a YAML file by its name."""
    if not target.endswith((".yaml", ".yml")):
        return None
    from trt_layering.config import load

    return load(target)


def _natural(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, not {quoted(text)}")
    return int(text)


def _block_size(text: str | None) -> BlockSize | None:
    from trt_layering.config import AUTO, BlockSize

    if text is None:
        return None
    return BlockSize(0) if text == AUTO else BlockSize(parse_size(text, what="--block-size"))


def _size(text: str | None, flag: str, kind: Callable[[int], int]) -> int | None:
    return None if text is None else kind(parse_size(text, what=flag))
