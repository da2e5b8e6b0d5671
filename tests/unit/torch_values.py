"""Trees of tensors such as torch.save writes, and whether what was read of one says the same as torch does."""

from __future__ import annotations

import collections

import torch
from hypothesis import strategies as st

from ds_reshard.model.records import ElementType, TensorRecord

DTYPES = [getattr(torch, member.label) for member in ElementType]


def live(record: TensorRecord) -> torch.Tensor:
    """The tensor that a record describes, from the whole file's bytes."""
    with open(record.storage.path, "rb") as file:
        file.seek(record.storage.byte_offset)
        data = bytearray(file.read(record.storage.nbytes))
    dtype = getattr(torch, record.dtype.label)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return torch.as_strided(flat, record.shape, record.stride, record.element_offset)


def same(found: object, expected: object) -> bool:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, TensorRecord)
        assert getattr(torch, found.dtype.label) == expected.dtype
        assert (found.shape, found.requires_grad) == (tuple(expected.shape), expected.requires_grad)
        if expected.numel():
            assert (found.stride, found.element_offset) == (expected.stride(), expected.storage_offset())
        assert found.contiguous == expected.is_contiguous()
        return torch.equal(raw(live(found)), raw(expected))
    if isinstance(expected, (list, tuple)):
        assert (isinstance(found, list), len(found)) == (isinstance(expected, list), len(expected))
        return all(map(same, found, expected))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    return type(found) is type(expected) and found == expected


def raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # of stride 1, which one element need not have
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.arange(24 * 24)[: int(torch.tensor(shape).prod())].to(dtype).reshape(shape)
    for axis in range(len(shape)):
        start = draw(st.integers(0, shape[axis]))
        tensor = tensor.narrow(axis, start, draw(st.integers(0, shape[axis] - start)))
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    if draw(st.booleans()) and tensor.dim():
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    if dtype in (torch.float32, torch.bfloat16) and draw(st.booleans()):
        return torch.nn.Parameter(tensor.clone(), requires_grad=draw(st.booleans()))
    return tensor


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5)
)
TREES = st.recursive(
    st.one_of(PLAIN, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 99)), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=8,
)
