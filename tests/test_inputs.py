"""What goes into a model: random arrays, files and images."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.errors import InputError
from trt_layering.inputs import Pixels, concrete_shapes, image, load, seeded
from trt_layering.store.manifest import Value

X = Value(name="x", dtype="float32", shape=("n", 3, "h", "w"))
Y = Value(name="y:0", dtype="int64", shape=("n", None))


def test_seeded_arrays_are_the_same_again_and_differ_by_seed_and_name():
    one, again, other = (seeded([X, Y], {}, seed)["x"] for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert np.array_equal(seeded([Y, X], {}, 0)["x"], one)
    renamed = Value(name="z", dtype="float32", shape=X.shape)
    assert not np.array_equal(seeded([renamed], {}, 0)["z"], one)


def test_unknown_dims():
    assert concrete_shapes([X, Y], {}) == [(1, 3, 64, 64), (1, 64)]
    assert concrete_shapes([X, Y], {"x": (5, 3, 2, 7)}) == [(5, 3, 2, 7), (5, 64)]
    swapped = Value(name="s", dtype="float32", shape=("n", "n", "h"))
    assert concrete_shapes([X, swapped], {"x": (2, 3, 9, 9)}) == [(2, 3, 9, 9), (2, 2, 9)]


@given(
    st.lists(st.one_of(st.integers(1, 5), st.none(), st.sampled_from("abc")), max_size=4),
    st.sampled_from(["float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "uint8", "bool"]),
)
def test_every_dtype_and_shape(shape, dtype):
    value = Value(name="v", dtype=dtype, shape=tuple(shape))
    array = seeded([value], {"v": [dim if isinstance(dim, int) else 2 for dim in shape]}, 3)["v"]
    assert array.dtype.name == dtype
    assert array.shape == tuple(dim if isinstance(dim, int) else 2 for dim in shape)
    if array.dtype.kind in "iub":
        assert set(np.unique(array)) <= {0, 1}


def test_floats_are_standard_normal():
    array = seeded([Value(name="v", dtype="float32", shape=(100, 1000))], {}, 0)["v"]
    assert abs(float(array.mean())) < 0.02
    assert abs(float(array.std()) - 1) < 0.02


def test_text_inputs():
    array = seeded([Value(name="v", dtype="string", shape=(8,))], {}, 0)["v"]
    assert array.dtype == object
    assert set(array) <= {"0", "1"}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"x": (1, 4, 2, 2)}, "4 where 3 is 3"),
        ({"x": (1, 3, 2)}, "wrong rank"),
        ({"x": (1, 3, 2, 2), "y:0": (2, 5)}, "2 where n is 1"),
        ({"xx": (1,)}, "did you mean 'x'"),
    ],
)
def test_shapes_that_do_not_fit(shapes, words):
    with pytest.raises(InputError) as caught:
        seeded([X, Y], shapes, 0)
    assert words in str(caught.value)


def test_a_seed_below_zero():
    with pytest.raises(InputError, match="0 or more, not -1"):
        seeded([X], {}, -1)


@pytest.mark.parametrize(
    ("shape", "size"), [((10**12, 128), "476837.16 GiB"), ((10**17, 512), "over 4 EiB"), ((10**17,) * 70, "over 4 EiB")]
)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_arrays_too_large_for_memory(shape, size, dtype):
    with pytest.raises(InputError) as caught:
        seeded([Value(name="v", dtype=dtype, shape=None)], {"v": shape}, 0)
    assert f"takes {size}, more than there is" in caught.value.what
    assert "'v'" in caught.value.where


def test_what_cannot_be_made():
    with pytest.raises(InputError, match="does not say what shape"):
        seeded([Value(name="v", dtype="float32", shape=None)], {}, 0)
    assert seeded([Value(name="v", dtype="float32", shape=None)], {"v": (2,)}, 0)["v"].shape == (2,)
    with pytest.raises(InputError, match="complex64"):
        seeded([Value(name="v", dtype="complex64", shape=(1,))], {}, 0)


def test_arrays_from_files(tmp_path):
    x, y = np.ones((1, 3, 2, 2), np.float32), np.zeros((1, 4), np.int64)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "a=b.npy", y)
    np.savez(tmp_path / "both.npz", **{"x": x, "y:0": y})
    named = load([f"x={tmp_path}/x.npy", f"y:0={tmp_path}/a=b.npy"], [X, Y])
    together = load([f"{tmp_path}/both.npz"], [X, Y])
    for feeds in (named, together):
        assert np.array_equal(feeds["x"], x)
        assert np.array_equal(feeds["y:0"], y)
    assert np.array_equal(load([f"{tmp_path}/a=b.npy"], [Y])["y:0"], y)


def test_names_with_equals_signs(tmp_path):
    value = Value(name="a=b", dtype="int64", shape=None)
    np.save(tmp_path / "c.npy", np.arange(3))
    assert list(load([f"a=b={tmp_path}/c.npy"], [value, X])) == ["a=b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x={}/none.npy", "No such file"),
        ("{}/one.npy", "is for which input?"),
        ("z={}/one.npy", "no input 'z'"),
        ("x={}/text.npy", "damaged or of another kind"),
        ("x={}/short.npy", "damaged or of another kind"),
        ("x={}/empty.npy", "damaged or of another kind"),
        ("x={}/long.npy", "damaged or of another kind"),
        ("x={}/longer.npy", "damaged or of another kind"),
        ("x={}/pickle.npy", "damaged or of another kind"),
        ("{}/pickle.npz", "damaged or of another kind"),
        ("{}/short.npz", "damaged or of another kind"),
        ("{}/one.npz", "damaged or of another kind"),
        ("{}/other.npz", "no input 'q'"),
        ("x={}/other.npz", "without a name"),
        ("x={}/words.txt", "cannot read inputs from"),
        ("x={}", "cannot read inputs from"),
        ("x={}/text.png", "cannot read the image"),
        ("x={}/none.png", "no file"),
    ],
)
def test_files_that_do_not_fit(tmp_path, text, words):
    one = np.zeros(1, np.float32)
    np.save(tmp_path / "one.npy", one)
    (tmp_path / "one.npz").write_bytes((tmp_path / "one.npy").read_bytes())
    np.save(tmp_path / "pickle.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "pickle.npz", x=np.array([{}]))
    np.savez(tmp_path / "other.npz", q=one)
    (tmp_path / "short.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:-30])
    (tmp_path / "short.npy").write_bytes((tmp_path / "one.npy").read_bytes()[:-1])
    (tmp_path / "empty.npy").touch()
    for name, dim in (("long", 10**15), ("longer", 10**30)):
        with (tmp_path / f"{name}.npy").open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (dim,)}
            np.lib.format.write_array_header_1_0(file, header)
    for name in ("text.npy", "words.txt", "text.png"):
        (tmp_path / name).write_text("not an array")
    with pytest.raises(InputError) as caught:
        load([text.format(tmp_path)], [X, Y])
    assert words in str(caught.value)
    assert caught.value.remedy


def test_a_damaged_member_of_an_archive(tmp_path):
    np.savez(tmp_path / "f.npz", x=np.arange(1000))
    raw = bytearray((tmp_path / "f.npz").read_bytes())
    raw[600] ^= 1
    (tmp_path / "f.npz").write_bytes(raw)
    with zipfile.ZipFile(tmp_path / "f.npz") as archive:
        assert archive.testzip() == "x.npy"
    with pytest.raises(InputError, match="damaged"):
        load([f"{tmp_path}/f.npz"], [Value(name="x", dtype="int64", shape=None)])


def test_one_input_given_twice(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(1))
    with pytest.raises(InputError, match="given twice"):
        load([f"x={tmp_path}/x.npy", f"x={tmp_path}/x.npy"], [X])


class TestImages:
    """A picture 40 wide and 20 high, left half red, right half black."""

    @pytest.fixture
    def file(self, tmp_path):
        pillow = pytest.importorskip("PIL.Image")
        picture = pillow.new("RGB", (40, 20), (255, 0, 0))
        picture.paste((0, 0, 0), (20, 0, 40, 20))
        picture.save(tmp_path / "p.png")
        return tmp_path / "p.png"

    @pytest.mark.parametrize(
        ("shape", "expected"),
        [
            ((1, 3, 10, 10), (1, 3, 10, 10)),
            (("n", 3, "h", "w"), (1, 3, 20, 40)),
            (("n", "c", 10, "w"), (1, 3, 10, 20)),
            ((1, 1, "h", 10), (1, 1, 5, 10)),
            ((2, 10, 12, 3), (2, 10, 12, 3)),
            ((3, 8, 8), (3, 8, 8)),
            ((8, 8, 1), (8, 8, 1)),
        ],
    )
    def test_layouts_and_sizes(self, file, shape, expected):
        array = image(file, Value(name="x", dtype="float32", shape=shape), Pixels())
        assert array.shape == expected
        assert array.dtype == np.float32
        assert array.flags.c_contiguous

    def test_pixels(self, file):
        value = Value(name="x", dtype="float32", shape=(1, 3, 20, 40))
        array = image(file, value, Pixels(mean=(0.5, 0.25, 0.0), std=(0.5, 0.5, 1.0)))
        assert array[0, :, 10, 2].tolist() == [1.0, -0.5, 0.0]
        assert array[0, :, 10, 37].tolist() == [-1.0, -0.5, 0.0]

    @pytest.mark.parametrize("dtype", ["uint8", "int32"])
    def test_integers_keep_the_pixels(self, file, dtype):
        array = image(file, Value(name="x", dtype=dtype, shape=(1, 20, 40, 3)), Pixels(mean=(0.5,)))
        assert array.dtype.name == dtype
        assert array[0, 10, 2].tolist() == [255, 0, 0]

    def test_open_sides_can_be_given(self, file):
        feeds = load([f"x={file}"], [X], shapes={"x": (1, 3, 6, 8)})
        assert feeds["x"].shape == (1, 3, 6, 8)

    @pytest.mark.parametrize("shape", [(1, 3, 10**9, 10**9), (1, 10**18, 8, 3), (10**12, 3, 20, 40)])
    def test_arrays_too_large_for_memory(self, file, shape):
        with pytest.raises(InputError, match=r"takes .*, more than there is"):
            image(file, Value(name="x", dtype="float32", shape=shape), Pixels())

    @pytest.mark.parametrize("shape", [(1, 10), (1, 4, 10, 10), None, (1, 2, 3, 4, 5)])
    def test_inputs_that_take_no_images(self, file, shape):
        with pytest.raises(InputError, match="takes no images"):
            image(file, Value(name="x", dtype="float32", shape=shape), Pixels())

    def test_numbers_for_other_channels(self, file):
        with pytest.raises(InputError, match="3 channels"):
            image(file, Value(name="x", dtype="float32", shape=(1, 3, 4, 4)), Pixels(mean=(0.5, 0.5)))

    def test_pictures_too_large_to_open(self, file, monkeypatch):
        monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 700)
        with pytest.raises(InputError, match="cannot read the image"):
            image(file, X, Pixels())
