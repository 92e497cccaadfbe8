"""What goes into a model: seeded random arrays, or arrays and images from files.

May import errors, shapes, units and manifest types; Pillow only when an image is read. A file or a shape that does not
fit the model's inputs raises InputError, which names the input.
"""

from __future__ import annotations

import difflib
import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_layering.errors import InputError
from trt_layering.shapes import format_shape
from trt_layering.store.manifest import Dim, Value
from trt_layering.units import format_size

if TYPE_CHECKING:
    from PIL.Image import Image

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]

_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_LANCZOS = 1  # PIL.Image.Resampling.LANCZOS
_UNKNOWN_FIRST = 1
_UNKNOWN_OTHER = 64


@dataclass(frozen=True)
class Pixels:
    """How an image's pixels become numbers: (pixel / 255 - mean) / std, where the input is of a float type; integer
    inputs get 0 to 255 as they are. One number each, or one a channel."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


def seeded(values: Sequence[Value], shapes: Mapping[str, Sequence[int]], seed: int) -> Feeds:
    """A random array for each of `values`, always the same for one name, shape and `seed`.

    Floats are standard normal; integers 0 or 1, so that they are valid indices and masks; text is "0" or "1". `shapes`
    gives the sizes of unknown dims; those it does not give are 1 in front and 64 elsewhere, and one symbol has one size
    everywhere. InputError if a shape does not fit its input, an input's rank is unknown and not given, an array is
    too large for memory, or the seed is below zero.
    """
    if seed < 0:
        raise InputError(f"the seed must be 0 or more, not {seed}", where="seed", remedy="give one that is, or none")
    return {
        value.name: _random(value, shape, np.random.default_rng([seed, zlib.crc32(value.name.encode())]))
        for value, shape in zip(values, concrete_shapes(values, shapes), strict=True)
    }


def concrete_shapes(values: Sequence[Value], shapes: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
    """A shape without unknown dims for each of `values`, by the rule of `seeded`."""
    _require_known(shapes, values)
    symbols: dict[str, int] = {}
    for value in values:
        if value.name in shapes:
            _match(value, shapes[value.name], symbols)
    return [
        tuple(shapes[value.name])
        if value.name in shapes
        else tuple(_size(dim, axis, symbols) for axis, dim in enumerate(_known_rank(value)))
        for value in values
    ]


def _match(value: Value, shape: Sequence[int], symbols: dict[str, int]) -> None:
    """Check `shape` against what the model says, and learn the sizes of its symbols."""
    if value.shape is None:
        return
    where = f"input {value.name!r}, which is {describe(value)}"
    if len(shape) != len(value.shape):
        raise InputError(f"shape {format_shape(shape)} has the wrong rank", where=where, remedy="give one number a dim")
    for dim, size in zip(value.shape, shape, strict=True):
        expected = symbols.setdefault(dim, size) if isinstance(dim, str) else size if dim is None else dim
        if expected != size:
            what = f"shape {format_shape(shape)} does not fit: {size} where {dim} is {expected}"
            raise InputError(what, where=where, remedy="give each known dim, and each symbol, one size")


def _known_rank(value: Value) -> tuple[Dim, ...]:
    if value.shape is None:
        remedy = f"give its shape, for instance --shape {value.name}:1x3x224x224"
        raise InputError("the model does not say what shape it takes", where=f"input {value.name!r}", remedy=remedy)
    return value.shape


def _size(dim: Dim, axis: int, symbols: dict[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    default = _UNKNOWN_OTHER if axis else _UNKNOWN_FIRST
    return default if dim is None else symbols.setdefault(dim, default)


def _random(value: Value, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    try:
        return _drawn(value, shape, rng)
    except (MemoryError, ValueError):  # which of them depends on how much too large it is
        raise _too_large(value, shape) from None


def _too_large(value: Value, shape: Sequence[int]) -> InputError:
    size = format_size(math.prod(shape) * numpy_dtype(value).itemsize)
    where = f"input {value.name!r}, which is {describe(value)}"
    what = f"an array of shape {format_shape(shape)} takes {size}, more than there is"
    return InputError(what, where=where, remedy="give it a smaller shape")


def _drawn(value: Value, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if value.dtype == "string":
        return rng.integers(0, 2, shape).astype(str).astype(object)
    dtype = numpy_dtype(value)
    if dtype.kind in "iub":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype == np.float64:
        return rng.standard_normal(shape)
    return np.asarray(rng.standard_normal(shape, dtype=np.float32)).astype(dtype, copy=False)


def numpy_dtype(value: Value) -> np.dtype[Any]:
    """The numpy dtype of `value`'s elements (text is object). InputError where numpy has none."""
    if value.dtype == "string":
        return np.dtype(object)
    try:
        if value.dtype == "bfloat16":
            import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16 if value.dtype == "bfloat16" else value.dtype)
    except (TypeError, ImportError):
        dtype = np.dtype(object)
    if dtype.kind not in "iubf" and value.dtype != "bfloat16":
        remedy = "give an array of your own from a .npy file" if dtype.kind == "c" else "use another model"
        raise InputError(f"arrays of {value.dtype} cannot be made", where=f"input {value.name!r}", remedy=remedy)
    return dtype


def load(
    texts: Iterable[str],
    values: Sequence[Value],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    pixels: Pixels | None = None,
) -> Feeds:
    """Feeds for the inputs `values` from `NAME=FILE` or `FILE` texts, as a command line gives them.

    `.npy` and images need a name where the model has several inputs; `.npz` without a name gives one array per entry.
    Arrays come as they are in the file: whether they fit is for the chain to say. Images are converted for their input,
    see `image`. InputError for a file that is missing, of another kind, damaged or holding pickled objects.
    """
    feeds: Feeds = {}
    for text in texts:
        name, file = _split(text, values)
        for key, array in _read(name, file, values, shapes or {}, pixels or Pixels()).items():
            if key in feeds:
                raise InputError(f"input {key!r} is given twice", where=text, remedy="give each input once")
            feeds[key] = array
    _require_known(feeds, values)
    return feeds


def _split(text: str, values: Sequence[Value]) -> tuple[str | None, Path]:
    """Names and paths may both contain "=": a known input's name wins, else the first "=" divides."""
    names = sorted((value.name for value in values if text.startswith(f"{value.name}=")), key=len)
    if names:
        return names[-1], Path(text[len(names[-1]) + 1 :])
    if "=" not in text or Path(text).exists():
        return None, Path(text)
    name, _, file = text.partition("=")
    return name, Path(file)


def _read(
    name: str | None, file: Path, values: Sequence[Value], shapes: Mapping[str, Sequence[int]], pixels: Pixels
) -> Feeds:
    suffix = file.suffix.lower()
    if suffix == ".npz" and name is None:
        return _read_npz(file)
    if suffix not in (".npy", *_IMAGES):
        remedy = (
            "give a .npy or .npz file, or an image" if suffix != ".npz" else "give it without a name: --input FILE.npz"
        )
        raise InputError(f"cannot read inputs from {file.name!r}", where=str(file), remedy=remedy)
    if name is None:
        if len(values) != 1:
            names = ", ".join(value.name for value in values)
            raise InputError(
                f"{file.name!r} is for which input?", where=str(file), remedy=f"NAME={file}; one of {names}"
            )
        name = values[0].name
    _require_known([name], values)
    if suffix == ".npy":
        return {name: _read_npy(file)}
    value = next(value for value in values if value.name == name)
    if name in shapes:
        _match(value, shapes[name], {})
        value = Value(name=name, dtype=value.dtype, shape=tuple(shapes[name]))
    return {name: image(file, value, pixels)}


def _read_npy(file: Path) -> Array:
    with _file_errors(file), file.open("rb") as opened:
        array = np.load(opened, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it holds several arrays")
        return array


def _read_npz(file: Path) -> Feeds:
    with _file_errors(file), file.open("rb") as opened:
        archive = np.load(opened, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds one array without a name")
        with archive:
            return {key: archive[key] for key in archive.files}


@contextmanager
def _file_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot read {file.name!r}: {error.strerror or error}"
        raise InputError(what, where=str(file), remedy="name a file that exists and is whole") from None
    except Exception as error:  # numpy's and zipfile's, on bytes of unknown origin
        what = f"{file.name!r} is damaged or of another kind: {str(error) or type(error).__name__}"
        raise InputError(
            what, where=str(file), remedy="write it with numpy.save or numpy.savez, plain arrays only"
        ) from None


def image(file: Path, value: Value, pixels: Pixels) -> Array:
    """The picture in `file` as an array for `value`, which the caller owns.

    Channels come first or last as the shape says, 1 or 3 of them. The picture is resized to the input's height and
    width; a side that the model leaves open follows in proportion, and where both are open the picture keeps its size.
    InputError if the input takes no images, or the file is none.
    """
    layout = _Layout.of(value)
    dtype = numpy_dtype(value)
    picture = _open_image(file, "L" if layout.channels == 1 else "RGB")
    size = layout.size(picture.width, picture.height)
    try:
        return _as_array(picture.resize(size, _LANCZOS), layout, value, dtype, pixels)
    except (MemoryError, OverflowError, ValueError):
        raise _too_large(value, layout.shape(*size)) from None


def _as_array(picture: Image, layout: _Layout, value: Value, dtype: np.dtype[Any], pixels: Pixels) -> Array:
    numbers: Array = np.asarray(picture, dtype=np.float32).reshape(picture.height, picture.width, layout.channels)
    if dtype.kind not in "iub":
        mean, std = (_per_channel(part, layout, value) for part in (pixels.mean, pixels.std))
        numbers = (numbers / np.float32(255) - mean) / std
    if layout.channel_axis == 0:
        numbers = numbers.transpose(2, 0, 1)
    stacked = np.repeat(numbers[None], layout.batch, axis=0) if layout.batch else numbers
    return np.ascontiguousarray(stacked.astype(dtype))


@dataclass(frozen=True)
class _Layout:
    """An image input: `batch` is 0 without a batch axis, `channel_axis` 0 or 2, height and width None where open."""

    batch: int
    channels: int
    channel_axis: int
    height: int | None
    width: int | None

    @classmethod
    def of(cls, value: Value) -> _Layout:
        shape = value.shape or ()
        dims = [dim if isinstance(dim, int) else None for dim in shape]
        inner = dims[-3:]
        if len(dims) not in (3, 4) or (inner[0] not in (None, 1, 3) and inner[2] not in (1, 3)):
            remedy = "give a .npy file; images suit 1x3xHxW and its like"
            raise InputError(f"input {value.name!r} takes no images", where=f"it is {describe(value)}", remedy=remedy)
        axis = 2 if inner[0] not in (1, 3) and inner[2] in (1, 3) else 0
        channels = inner.pop(axis) or 3
        return cls(dims[0] or 1 if len(dims) == 4 else 0, channels, axis, inner[0], inner[1])

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height to resize a picture of `width` and `height` to."""
        if self.height is None and self.width is None:
            return width, height
        if self.width is None:
            assert self.height is not None
            return max(1, int(width * (self.height / height))), self.height
        return self.width, max(1, int(height * (self.width / width))) if self.height is None else self.height

    def shape(self, width: int, height: int) -> tuple[int, ...]:
        """That of the array for a picture of `width` and `height`."""
        sides = [height, width]
        sides.insert(self.channel_axis, self.channels)
        return (self.batch, *sides) if self.batch else tuple(sides)


def _open_image(file: Path, mode: str) -> Image:
    try:
        import PIL.Image
    except ImportError:
        remedy = "pip install pillow, or give a .npy file"
        raise InputError("images need Pillow, which is not installed", where=str(file), remedy=remedy) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            with PIL.Image.open(file) as opened:
                picture: Image = opened.convert(mode)
                return picture
    except FileNotFoundError:
        raise InputError(f"there is no file {file.name!r}", where=str(file), remedy="name a file that exists") from None
    except Exception as error:  # Pillow's, on bytes of unknown origin
        words = str(error) or type(error).__name__
        raise InputError(f"cannot read the image: {words}", where=str(file), remedy="give another image") from None


def _per_channel(numbers: tuple[float, ...], layout: _Layout, value: Value) -> Array:
    if len(numbers) not in (1, layout.channels):
        what = f"{len(numbers)} numbers for mean or std, and the image has {layout.channels} channels"
        raise InputError(what, where=f"input {value.name!r}", remedy="give one number, or one a channel")
    return np.asarray(numbers, dtype=np.float32)


def _require_known(names: Iterable[str], values: Sequence[Value]) -> None:
    known = [value.name for value in values]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else f"its inputs are {', '.join(known)}"
            raise InputError(f"the model has no input {name!r}", where=f"input {name!r}", remedy=remedy)


def describe(value: Value) -> str:
    """`float32 1x3xHxW`, for messages."""
    return f"{value.dtype} {format_shape(value.shape) if value.shape is not None else 'of unknown rank'}"
