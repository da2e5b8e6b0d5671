"""The fingerprint: the same number however a tensor is cut, another for whatever happened to it."""

from __future__ import annotations

import random
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_reshard.execution import fingerprint
from ds_reshard.execution.fingerprint import BLOCK_WORDS, Fingerprints, fingerprint_of, sum_on_device, word_factors
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.region import Box, Region

QUICK = settings(max_examples=60)
KEY = TensorKey(name="w", kind="weight")
BLOCK_NBYTES = 4 * BLOCK_WORDS
BIG = random.Random(0).randbytes(2 * BLOCK_NBYTES + 4 * 16 * 3)
DOCUMENT = Path(__file__).parents[2] / "docs" / "fingerprint.md"


@cache
def by_the_book(data: bytes) -> str:
    """The definition of docs/fingerprint.md, one word at a time; shares no code with the package."""

    def mixed(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return (x ^ x >> 31) | 1

    words = [word for (word,) in struct.iter_unpack("<i", data + bytes(-len(data) % 4))]
    table = [mixed(j) for j in range(min(len(words), 16384))]
    total = sum(mixed(2**32 + i // 16384) * table[i % 16384] * word for i, word in enumerate(words))
    return f"{total % 2**64:016x}"


VECTORS = {
    "no bytes": b"",
    "int32 `[1]`": struct.pack("<i", 1),
    "int32 `[-1]`": struct.pack("<i", -1),
    "int32 `[0, 1]`": struct.pack("<2i", 0, 1),
    "int32 `[1, 2, 3]`": struct.pack("<3i", 1, 2, 3),
    "float32 `[1.0, -2.5]`": struct.pack("<2f", 1.0, -2.5),
    "float32 `[0.0, -0.0]`": struct.pack("<2f", 0.0, -0.0),
    "bfloat16 `[1.0, -2.0, 0.5]`": bytes.fromhex("803f00c0003f"),
    "float64 `[1.0]`": struct.pack("<d", 1.0),
    "complex128 `[1.0 - 2.0j]`": struct.pack("<2d", 1.0, -2.0),
    "uint8 `[1, 2, 3, 4, 5, 255]`": bytes([1, 2, 3, 4, 5, 255]),
    "int32 `[0] * 16384 + [1]`": bytes(BLOCK_NBYTES) + struct.pack("<i", 1),
    "uint8 `[i * i % 251 for i in range(200001)]`": bytes(i * i % 251 for i in range(200001)),
}


def test_vectors_are_in_the_document() -> None:
    """The table of docs/fingerprint.md is this one, computed by the definition."""
    table = "\n".join(f"| {name} | `{by_the_book(data)}` |" for name, data in VECTORS.items())
    assert table in DOCUMENT.read_text(encoding="utf-8"), f"put this table into docs/fingerprint.md:\n{table}"


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_come_out(name: str) -> None:
    assert str(fingerprint_of(VECTORS[name])) == by_the_book(VECTORS[name])


def test_values_are_the_bytes_of_a_tensor() -> None:
    """Each type is summed as its bits: bfloat16, float8, bool and complex as well."""
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.int8,
        torch.bool,
        torch.int64,
        torch.float8_e4m3fn,
    ):
        tensor = torch.randn(5, 7).to(dtype)
        assert str(fingerprint_of(tensor)) == by_the_book(tensor.view(-1).view(torch.uint8).numpy().tobytes()), dtype


@QUICK
@given(cuts=st.lists(st.integers(0, len(BIG) // 4), max_size=9), step=st.sampled_from((1000, 4096, 16384)))
@example(cuts=[], step=16384)
def test_many_parts_at_once(cuts, step):
    """Of two tensors by turns; more of them than there is room for at once."""
    ends = sorted({0, len(BIG) // 4, *cuts, *range(0, len(BIG) // 4, step)})
    parts = [(key, 4 * a, memoryview(BIG)[4 * a : 4 * b]) for a, b in pairwise(ends) for key in ("one", "other")]
    sums = Fingerprints[str]()
    with mock.patch.multiple(fingerprint, _HOST_PORTION_NBYTES=2 * BLOCK_NBYTES, _ROOMS=[]):
        sums.add_all(*zip(*parts, strict=True))
    assert str(sums["one"]) == str(sums["other"]) == by_the_book(BIG)
    assert sums["one"].nbytes == len(BIG)


@QUICK
@given(
    cuts=st.lists(st.integers(0, len(BIG)), min_size=2, max_size=5).map(sorted),
    shift=st.integers(0, 4),
    portion=st.sampled_from((1, 128)),
)
def test_a_device_sums_as_the_host_does(cuts, shift, portion):
    """The operations that run where a tensor lies, here on the host's own memory: any place in the whole, any address.

    Parts are added up there; words that two parts share are of both.
    """
    there, here = Fingerprints(), Fingerprints()
    with mock.patch.object(fingerprint, "_DEVICE_PORTION_NBYTES", portion * BLOCK_NBYTES):
        for start, stop in pairwise(cuts):
            memory = torch.frombuffer(bytearray(shift) + bytearray(BIG[start:stop]) + b"\0", dtype=torch.uint8)
            there.add_elsewhere(KEY, start, memory[shift : shift + stop - start])
            here.add(KEY, start, BIG[start:stop])
    assert there[KEY] == here[KEY]
    assert there[KEY] == here[KEY], "a second look changes nothing"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_sums_as_the_host_does() -> None:
    """Whole and in parts, aligned and not, of more blocks than one portion has."""
    data = torch.randint(-128, 127, (130 * BLOCK_NBYTES + 77,), dtype=torch.int8)
    whole, there = fingerprint_of(data), data.cuda()
    assert fingerprint_of(there) == whole
    for cuts in ((0, 5, 64 * BLOCK_NBYTES, len(data)), (0, BLOCK_NBYTES - 2, BLOCK_NBYTES + 3, len(data))):
        sums = Fingerprints()
        for start, stop in pairwise(cuts):
            sums.add(KEY, start, there[start:stop])
        assert sums[KEY] == whole


DTYPES = sorted(name for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype))
SIZES = (0, 1, 3, BLOCK_NBYTES - 1, BLOCK_NBYTES, 16 * BLOCK_NBYTES + 6, 33 * BLOCK_NBYTES + 1)


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_is_summed_on_a_device_as_on_the_host(name: str) -> None:
    """By its bits, whatever they mean; a type that bytes cannot be viewed as is no tensor's that is saved."""
    try:
        tensor = torch.frombuffer(bytearray(BIG[:4096]), dtype=torch.uint8).view(getattr(torch, name))
        tensor.view(torch.uint8)
    except RuntimeError:
        pytest.skip("no view of bytes as this type")
    there = Fingerprints()
    there.add_elsewhere(KEY, 0, tensor)
    assert there[KEY] == fingerprint_of(tensor)
    assert str(there[KEY]) == by_the_book(BIG[:4096])


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("position", (0, 1, 2, 4, BLOCK_NBYTES - 2, 15 * BLOCK_NBYTES + 4, 2**40 + 6, 2**62 + 3))
def test_sums_wrap_alike_far_away_and_over_portions(nbytes: int, position: int) -> None:
    """The largest and smallest words, of more blocks than the host has room for at once, at any address and place."""
    values, shifts = (0x7F, 0x80, 0xFF), (0, 1, 4)
    for value, shift in product(values, shifts) if nbytes <= BLOCK_NBYTES else zip(values, shifts, strict=True):
        memory = torch.full((nbytes + 4,), value, dtype=torch.uint8)
        memory[3::4] = 0x80
        part = memory[shift : shift + nbytes]
        here = Fingerprints()
        here.add(KEY, position, part)
        assert int(sum_on_device(position, part)) % 2**64 == here[KEY].value
        pieces = Fingerprints()
        for start in range(0, nbytes, 3 * BLOCK_NBYTES + 2):
            pieces.add_elsewhere(KEY, position + start, part[start : start + 3 * BLOCK_NBYTES + 2])
        assert pieces[KEY] == here[KEY]


@pytest.mark.parametrize("itemsize", (1, 2, 4, 8, 16))
@pytest.mark.parametrize("before", (0, BLOCK_NBYTES - 32))
def test_a_tensor_cut_at_any_two_elements_has_the_same_fingerprint(itemsize: int, before: int) -> None:
    """Every cut in three, at words, within words, and around the end of a block."""
    data = BIG[: before + 6 * 16]
    whole = fingerprint_of(data)
    head = Fingerprints()
    head.add(KEY, 0, data[:before])
    for a in range(before, len(data) + 1, itemsize):
        for b in range(a, len(data) + 1, itemsize):
            sums = Fingerprints()
            for start, stop in ((b, len(data)), (before, a), (a, b)):
                sums.add(KEY, start, data[start:stop])
            assert head[KEY] + sums[KEY] == whole, (a, b)


@st.composite
def dealt(draw):
    """Spans of whole elements of BIG, in any order."""
    itemsize = draw(st.sampled_from((1, 2, 4, 8, 16)))
    inner = draw(st.lists(st.integers(0, len(BIG) // itemsize), max_size=8))
    near = draw(st.lists(st.integers(-2, 2), max_size=3))
    edges = {0, len(BIG), *(i * itemsize for i in inner), *(BLOCK_NBYTES + i * itemsize for i in near)}
    return draw(st.permutations(list(pairwise(sorted(edges)))))


@QUICK
@given(dealt(), st.integers(0, 3))
def test_parts_add_up_in_any_order_and_at_any_address(spans, shift):
    """Of memory that begins at any address, writable or not, as bytes or as a tensor."""
    memory = bytearray(shift) + bytearray(BIG)
    sums = Fingerprints()
    for n, (start, stop) in enumerate(spans):
        view = memoryview(memory)[shift + start : shift + stop]
        part = (view, bytes(view), torch.frombuffer(memory, dtype=torch.uint8)[shift + start : shift + stop])[n % 3]
        sums.add(KEY, start, part)
    assert str(sums[KEY]) == by_the_book(BIG)
    assert sums[KEY].nbytes == len(BIG)


def test_threads_may_add_at_once() -> None:
    sums = Fingerprints()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: sums.add(KEY, at, BIG[at : at + 1000]), range(0, len(BIG), 1000)))
    assert sums[KEY] == fingerprint_of(BIG)


@QUICK
@given(st.data())
def test_regions_of_boxes_add_up(data):
    """A tensor cut in boxes (tensor parallel), each box cut in spans, is the tensor."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    tensor = torch.randn(shape).to(data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float64))))
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    sums = Fingerprints()
    for first, size in ((0, cut), (cut, shape[axis] - cut)):
        box = Box(
            offset=tuple(first if i == axis else 0 for i in range(len(shape))),
            size=tuple(size if i == axis else n for i, n in enumerate(shape)),
        )
        stored = tensor.narrow(axis, first, size).contiguous().view(-1)
        middle = data.draw(st.integers(0, box.numel))
        for start, stop in ((0, middle), (middle, box.numel)):
            sums.add_region(KEY, shape, Region(box=box, start=start, stop=stop), stored[start:stop])
    assert sums[KEY] == fingerprint_of(tensor)


def test_every_single_bit_flip_is_seen() -> None:
    """Signs, exponents and mantissas: each of the 1,024 bits of 32 words at the end of a block and behind it."""
    data = bytearray(BIG[: BLOCK_NBYTES + 64])
    seen = {str(fingerprint_of(data))}
    for bit in range(8 * (BLOCK_NBYTES - 64), 8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(str(fingerprint_of(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * 128


def test_two_words_of_a_block_never_stand_in_for_each_other() -> None:
    """Two sign flips, or two swapped words, of one block: always seen, whatever the words.

    A swap changes the sum by (w - v) * (T(i) - T(j)) * K and |w - v| < 2**32; two sign flips change it by
    2**31 * (+-T(i) +-T(j)) * K. Neither is 0 modulo 2**64 where T(i) is not +-T(j) modulo 2**33.
    """
    factors = [factor % 2**33 for factor in word_factors().tolist()]
    assert len({*factors, *(2**33 - factor for factor in factors)}) == 2 * BLOCK_WORDS


FLOATS = torch.randn(40_000, generator=torch.Generator().manual_seed(3))
NUMBER = st.integers(0, FLOATS.numel() - 1)


@QUICK
@given(st.sampled_from((torch.float32, torch.bfloat16)), NUMBER, NUMBER)
@example(torch.float32, 0, BLOCK_WORDS)
@example(torch.bfloat16, 2, 3)
def test_two_elements_that_changed_are_seen(dtype, i, j):
    """Swapped, or both with the other sign."""
    values = FLOATS.to(dtype)
    swapped, flipped = values.clone(), values.clone()
    swapped[[i, j]] = values[[j, i]]
    flipped[[i, j]] = -values[[i, j]]
    same = fingerprint_of(values)
    assert (fingerprint_of(swapped) == same) is bool(values[i] == values[j])
    assert fingerprint_of(flipped) != same


@QUICK
@given(st.sampled_from((torch.float32, torch.bfloat16)), NUMBER, st.integers(1, 5000))
def test_ranges_that_are_zero_shifted_or_read_twice_are_seen(dtype, start, numel):
    """A range that is lost, a range shifted by one element, a part that is added twice, a part from elsewhere."""
    values = FLOATS.to(dtype)
    part = slice(start, start + numel)
    lost, shifted, elsewhere = values.clone(), values.clone(), values.clone()
    lost[part] = 0
    shifted[part] = shifted[part].roll(1) if values[part].numel() > 1 else -values[part]
    elsewhere[part] = values[: values[part].numel()] if start else values[part].flip(0) + 1
    same = fingerprint_of(values)
    assert {fingerprint_of(lost).value, fingerprint_of(shifted).value, fingerprint_of(elsewhere).value} & {
        same.value
    } == set()
    sums = Fingerprints()
    sums.add(KEY, 0, values)
    sums.add(KEY, start * values.element_size(), values[part])
    assert sums[KEY] != same
    assert sums[KEY].value != same.value
    assert fingerprint_of(values.roll(1)) != same


def test_swapped_tensors_are_seen_by_their_keys() -> None:
    """The number says what a tensor holds; which one it is, the key says."""
    one, other = TensorKey(name="a", kind="fp32"), TensorKey(name="b", kind="fp32")
    right, swapped = Fingerprints(), Fingerprints()
    for sums, order in ((right, (one, other)), (swapped, (other, one))):
        for key, values in zip(order, (FLOATS[:100], FLOATS[100:200]), strict=True):
            sums.add(key, 0, values)
    assert right[one] == swapped[other] != right[other]
    assert right[TensorKey(name="a", kind="exp_avg")].nbytes == 0
