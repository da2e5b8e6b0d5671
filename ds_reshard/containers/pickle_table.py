"""The one table of names that a pickle may use, each with how, and why: by module and name.

A pickle runs whatever it names: `torch.load` and `pickle.load` import each name, call it, and give it state. So names
are allowed one by one, each for the uses that the frameworks make of it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord

if TYPE_CHECKING:
    from ds_reshard.containers.pickle_rules import PickleRules

Args = tuple[object, ...]
Items = Literal["", "list", "pairs", "both"]
Nested = Literal["", "opened", "held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The uses of a name that are allowed.

    `call` is REDUCE, where `fits` says of which arguments; `new` is NEWOBJ; `state` is BUILD, where `fits_state` says
    with what; `items` is APPENDS or SETITEMS. `value` is to stand in a list, a state or any other value: what is only
    called must not, because Python would call it where an object has an attribute of the right name. `callee_at` is the
    place of the one argument that is itself called. Bytes that are handed to a `nested` name are read as a pickle of
    their own: it opens them as one, or holds them for what may. `keywords` allows keywords, and attributes of any name.
    `enum` is the class of an enum. `reason` says why it is harmless, or who saves it.
    """

    reason: str
    call: bool = False
    new: bool = False
    state: bool = False
    items: Items = ""
    value: bool = False
    callee_at: int = -1
    nested: Nested = ""
    keywords: bool = False
    enum: bool = False
    fits: Callable[[Args, PickleRules], bool] | None = None
    fits_state: Callable[[object], bool] | None = None

    @property
    def plain(self) -> bool:
        """Whether NEWOBJ without arguments is allowed, and all there is to see about it."""
        return self.new and self.fits is None and not self.nested


TRUSTED = Allowed(reason="the user trusts it", call=True, new=True, state=True, items="both", value=True, keywords=True)

# -- checks of arguments and states ------------------------------------------------------------------------------------


def plain_state(state: object) -> bool:
    """Whether a state sets no attribute that Python itself looks up: `__setstate__`, `__class__` and the like."""
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            for name in part:
                if not isinstance(name, str) or name.startswith("__"):
                    return False
        elif _is_mapping(part):
            return False
    return True


def _is_mapping(value: object) -> bool:
    """Whether a record may be a dict whose keys are not known here."""
    return isinstance(value, ObjectRecord) and value.callable.module == "collections"


def is_enum(name: GlobalName) -> bool:
    """Whether a name is an enum of the table."""
    allowed = ALLOWED.get((name.module, name.name))
    return allowed is not None and allowed.enum


def reconstructed(function: GlobalName, args: Args) -> GlobalName | None:
    """The class of which copyreg's functions make an object by `__new__`, as protocols 0 and 1 have it; else None."""
    kind = args[0] if args else None
    if not isinstance(kind, GlobalName):
        return None
    of_object = len(args) == 3 and isinstance(args[1], GlobalName) and str(args[1]) == "builtins.object" and not args[2]
    return kind if (function.name == "_reconstructor" and of_object) or function.name == "__newobj__" else None


def _never(args: Args, rules: PickleRules) -> bool:
    return False


def _factory(args: Args, rules: PickleRules) -> bool:
    """Nothing, None, or a plain type, of which a defaultdict makes its values."""
    return not args or (len(args) == 1 and (args[0] is None or _dotted(args[0]) in _FACTORIES))


_FACTORIES = frozenset(f"builtins.{kind}" for kind in ("list", "dict", "int", "float", "set", "str", "bool", "tuple"))
_FACTORIES |= {"collections.OrderedDict"}


def _dotted(value: object) -> str:
    return str(value) if isinstance(value, GlobalName) else ""


def _single(args: Args, rules: PickleRules) -> bool:
    """The argument of `type(None)`, `type(...)` and `type(NotImplemented)`: pickle.py `save_type`."""
    return len(args) == 1 and (args[0] is None or _dotted(args[0]) in ("builtins.Ellipsis", "builtins.NotImplemented"))


def _literal(args: Args, rules: PickleRules) -> bool:
    """Nothing, or bytes that stand in the pickle: what is made by a call is not known here."""
    return not args or (len(args) == 1 and isinstance(args[0], bytes | bytearray))


def _one_literal(args: Args, rules: PickleRules) -> bool:
    return bool(args) and _literal(args, rules)


def _literal_or_latin(args: Args, rules: PickleRules) -> bool:
    """`bytes` and `bytearray` as pickle.py `save_bytes` and bytearray's own `__reduce_ex__` write them."""
    return _literal(args, rules) or _latin(args, rules)


def _latin(args: Args, rules: PickleRules) -> bool:
    """Bytes as protocols 0 to 2 write them: pickle.py `save_bytes`."""
    return len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1")


def _member(args: Args, rules: PickleRules) -> bool:
    """An enum of the table and a member's name: how Python 3.11.0 to 3.11.3 pickle one (enum.py `__reduce_ex__`)."""
    if len(args) != 2 or not isinstance(args[0], GlobalName) or not isinstance(args[1], str):
        return False
    return is_enum(args[0]) and args[1].isidentifier() and args[1][0] != "_" and args[1] not in _METHODS


def _named(args: Args, rules: PickleRules) -> bool:
    """What pickle writes as an attribute: the member of an enum, or a builtin function of torch."""
    return _member(args, rules) or (is_of_torch(args) and len(args) == 2 and f"torch.{args[1]}" in FUNCTIONS)


def is_of_torch(args: Args) -> bool:
    """Whether the arguments of `getattr` name something of the class whose functions are torch's builtins."""
    return bool(args) and _dotted(args[0]) == "torch._C._VariableFunctionsClass"


_METHODS = frozenset(dir(type)) | frozenset(dir(str)) | frozenset(dir(int))


def _no_hooks(args: Args, rules: PickleRules) -> bool:
    """No hooks among a tensor's arguments, which backward would call: torch saves an empty OrderedDict for them."""
    for value in args:
        if type(value) in _HOLDERS and value:
            held = value.values() if isinstance(value, dict) else ()
            if _is_mapping(value) or any(isinstance(one, GlobalName | ObjectRecord) for one in held):
                return False
    return True


_HOLDERS = frozenset({dict, OrderedDict, ObjectRecord})


def _with_state(args: Args, rules: PickleRules) -> bool:
    return len(args) == 4 and _no_hooks(args[:3], rules) and plain_state(args[3])


def _retyped(args: Args, rules: PickleRules) -> bool:
    """`_rebuild_from_type_v2(function, type, arguments, state)` calls a function: one that rebuilds a tensor."""
    if len(args) != 4 or not isinstance(args[0], GlobalName) or not isinstance(args[2], tuple):
        return False
    inner = ALLOWED.get((args[0].module, args[0].name))
    rebuilds = inner is not None and inner.reason == _TENSOR and (inner.fits is None or inner.fits(args[2], rules))
    return rebuilds and _is_tensor_type(args[1], rules) and plain_state(args[3])


def _is_tensor_type(kind: object, rules: PickleRules) -> bool:
    """One of torch's, one that is trusted, or one that was found where it is named."""
    if not isinstance(kind, GlobalName):
        return False
    allowed = rules.of(kind.module, kind.name)
    return str(kind) in _TENSOR_TYPES or allowed is TRUSTED or allowed is None


_TENSOR_TYPES = frozenset({"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"})
_TENSOR_TYPES |= {"torch.nn.parameter.Buffer", "torch.distributed.tensor.DTensor"}
_TENSOR_TYPES |= {"torch.distributed._tensor.api.DTensor", "torch.distributed._tensor.DTensor"}


def _wrapper(args: Args, rules: PickleRules) -> bool:
    return bool(args) and _is_tensor_type(args[0], rules)


def _array(args: Args, rules: PickleRules) -> bool:
    """An array that has no elements yet: numpy's own `__reduce__` gives them with the state."""
    return len(args) == 3 and _dotted(args[0]) == "numpy.ndarray" and args[1] in ((0,), ())


def _of_numbers(args: Args, rules: PickleRules) -> bool:
    """Arguments among which no element type is one of objects, of which bytes would be the addresses."""
    return not any(_holds_objects(arg) for arg in args)


_MOST_PARTS = 256


def _holds_objects(dtype: object) -> bool:
    """Whether an element type is one of objects, or has parts (by place or by name) that are, or very many parts."""
    left = [dtype]
    for part in left:
        if not isinstance(part, ObjectRecord) or _dotted(part.callable) != "numpy.dtype":
            continue
        name = part.args[0] if part.args else None
        state = part.state if isinstance(part.state, tuple) else ()
        of_one, _, of_many = (*state[2:5], None, None, None)[:3]
        inner = [*islice(of_many.values(), _MOST_PARTS)] if isinstance(of_many, dict) else [of_many]
        inner = [one for one in (of_one, *inner) if one is not None]
        if not isinstance(name, str) or _ELEMENT.fullmatch(name) is None or len(left) + len(inner) > _MOST_PARTS:
            return True
        if not all(isinstance(one, tuple) and one for one in inner):
            return True
        left += [one[0] for one in inner if isinstance(one, tuple)]
    return False


def _array_state(state: object) -> bool:
    """What `ndarray.__setstate__` takes: of objects it must be a list, as bytes would be their addresses."""
    if not isinstance(state, tuple) or len(state) < 2:
        return False
    return isinstance(state[-1], list) or not _holds_objects(state[-3] if len(state) > 2 else None)


def _nothing(args: Args, rules: PickleRules) -> bool:
    return not args


def _numbers(args: Args, rules: PickleRules) -> bool:
    return all(isinstance(arg, int | float) for arg in args)


_ELEMENT = re.compile(r"[<>=|]?[a-zA-NP-Z][0-9]*")  # as numpy's dtype.__reduce__ writes it


def _elements(args: Args, rules: PickleRules) -> bool:
    """Nothing, or what is there: no range of a million millions."""
    return not args or (len(args) == 1 and isinstance(args[0], list | tuple | set | frozenset | dict))


def _deque(args: Args, rules: PickleRules) -> bool:
    return _elements(args[:1], rules) and all(isinstance(arg, int | None) for arg in args[1:])


def _pairs(args: Args, rules: PickleRules) -> bool:
    """Nothing, or one list of pairs, as Python 2 wrote them."""
    pairs = args[0] if len(args) == 1 else None
    if not isinstance(pairs, list):
        return not args
    return all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)


def _bounds(args: Args, rules: PickleRules) -> bool:
    return 1 <= len(args) <= 3 and all(arg is None or type(arg) is int for arg in args)


def _sizes(args: Args, rules: PickleRules) -> bool:
    sizes = args[0] if len(args) == 1 else None
    return not args or (isinstance(sizes, (list, tuple)) and _INTEGERS.issuperset(map(type, sizes)))


_INTEGERS = frozenset({int, bool})


def _generator(args: Args, rules: PickleRules) -> bool:
    """A bit generator: its name, its class, or one that was made; and numpy's own function that makes them."""
    kinds = (arg.callable if isinstance(arg, ObjectRecord) else arg for arg in args)
    return all(isinstance(kind, str) or _dotted(kind).startswith("numpy.random.") for kind in kinds)


def _seed(args: Args, rules: PickleRules) -> bool:
    return len(args) == 3 and _dotted(args[0]) == "numpy.random.bit_generator.SeedSequence"


def _words(args: Args, rules: PickleRules) -> bool:
    return all(isinstance(arg, str | int) for arg in args)


def _inert(args: Args, rules: PickleRules) -> bool:
    """One function of FUNCTIONS: how `functools.partial` begins one, which its state completes."""
    return len(args) == 1 and _dotted(args[0]) in FUNCTIONS


def _inert_state(state: object) -> bool:
    """A function of FUNCTIONS, arguments and keywords of plain values, no attributes (`partial.__reduce__`)."""
    if not isinstance(state, tuple) or len(state) != 4 or state[3] is not None or _dotted(state[0]) not in FUNCTIONS:
        return False
    args, keywords = state[1:3]
    plain = isinstance(args, tuple) and type(keywords) is dict and {str}.issuperset(map(type, keywords))
    return plain and _LITERALS.issuperset(map(type, (*args, *keywords.values())))


_LITERALS = frozenset({type(None), bool, int, float, str})


def _value(args: Args, rules: PickleRules) -> bool:
    """The value of an enum's member."""
    return len(args) == 1 and (args[0] is None or isinstance(args[0], str | int | float | tuple))


# -- the table ---------------------------------------------------------------------------------------------------------

_TENSOR = "torch rebuilds a tensor from its storage"
_STORAGE = "a kind of storage"
_PLAIN = "a plain value of Python"
_KIND = "stands for a type"
_RANDOM = "a kind of random generator"
_TABLE: dict[tuple[str, str], Allowed] = {}


def _allow(
    module: str,
    names: Iterable[str] | str,
    reason: str,
    *,
    call: bool = False,
    new: bool = False,
    state: bool = False,
    items: Items = "",
    value: bool = False,
    callee_at: int = -1,
    nested: Nested = "",
    fits: Callable[[Args, PickleRules], bool] | None = None,
    fits_state: Callable[[object], bool] | None = None,
) -> None:
    """Allow names; one that is neither called nor made may stand as a value, in any case."""
    called = call or fits is not None
    one = Allowed(
        reason=reason,
        call=called,
        new=new,
        state=state,
        items=items,
        value=value or not (called or new),
        callee_at=callee_at,
        nested=nested,
        fits=fits,
        fits_state=fits_state,
    )
    for name in names.split() if isinstance(names, str) else names:
        _TABLE.setdefault((module, name), one)


def _objects(module: str, names: str, reason: str) -> None:
    """Classes whose objects are made by `__new__` and given their attributes; none calls what its state holds."""
    _allow(module, names, reason, new=True, state=True)


def _enums(module: str, names: str, owner: str) -> None:
    one = Allowed(reason=f"an enum of {owner}", call=True, value=True, enum=True, fits=_value)
    _TABLE.update(((module, name), one) for name in names.split())


# Python's own values.
_allow("builtins", "list dict int float str bool tuple object Ellipsis NotImplemented", _KIND)
_allow("builtins", "slice range", _PLAIN, fits=_bounds, value=True)
_allow("builtins", "complex", _PLAIN, value=True, fits=_numbers)
_allow("builtins", "set frozenset", _PLAIN, value=True, fits=_elements)
_allow("builtins", "bytes bytearray", _PLAIN, value=True, fits=_literal_or_latin)
_allow("builtins", "type", "type(None) and its like", fits=_single)
_NAMED = "the member of an enum, as Python 3.11.0 to 3.11.3 pickle it; a builtin of torch, as all do"
_allow("builtins", "getattr", _NAMED, fits=_named, callee_at=0)
_allow("_codecs", "encode", "bytes, as protocols 0 to 2 write them", fits=_latin)
_allow("copyreg", "_reconstructor __newobj__", "objects, as protocols 0 and 1 write them", fits=_never, callee_at=0)
_allow("collections", "OrderedDict", _PLAIN, fits=_pairs, state=True, items="pairs", value=True)
_allow("collections", "defaultdict", "a dict whose default is a plain type", fits=_factory, items="pairs", value=True)
_allow("collections", "Counter", _PLAIN, fits=_elements, items="pairs")
_allow("collections", "deque", _PLAIN, fits=_deque, items="list")
_allow("argparse", "Namespace", "attributes alone", fits=_nothing, new=True, state=True, value=True)
_allow("types", "SimpleNamespace", "attributes alone", fits=_nothing, state=True)
_allow("datetime", "datetime date time timedelta timezone", _PLAIN, call=True, value=True)
_enums("signal", "Signals", "Python: Megatron-LM keeps --exit-signal")
_PATHS = "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"
for _module in ("pathlib", "pathlib._local"):  # where Python 3.13 has them
    _allow(_module, _PATHS, "a path, not opened", call=True, value=True)
_HELD = "holds bytes; a pickle in it is read as well"
for _module in ("io", "_io"):
    _allow(_module, "BytesIO", _HELD, new=True, state=True, nested="held", fits=_literal)
    _allow(_module, "StringIO", "holds text", call=True, new=True, state=True)
_allow("operator", "itemgetter", "an index or a key", fits=_words)

# numpy's arrays, scalars, element types and random states.
_NUMPY = (
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 longdouble complex64 complex128 bool "
    "bool_ str_ bytes_ datetime64 timedelta64 intc uintc longlong ulonglong ndarray"
)
_allow("numpy", _NUMPY, _KIND)
_allow("numpy", "dtype", "an element type", call=True, state=True, value=True)
for _module in ("numpy.core", "numpy._core"):
    _allow(f"{_module}.multiarray", "_reconstruct", "an array", fits=_array, state=True, fits_state=_array_state)
    _allow(f"{_module}.multiarray", "scalar", "a number", fits=_of_numbers)
    _allow(f"{_module}.numeric", "_frombuffer", "an array", fits=_of_numbers)
_allow("numpy.random._mt19937", "MT19937", _RANDOM)
_allow("numpy.random._pcg64", "PCG64 PCG64DXSM", _RANDOM)
_allow("numpy.random._philox", "Philox", _RANDOM)
_allow("numpy.random._sfc64", "SFC64", _RANDOM)
_allow("numpy.random.bit_generator", "SeedSequence", _RANDOM)
_MAKERS = "__bit_generator_ctor __generator_ctor __randomstate_ctor"
_allow("numpy.random._pickle", _MAKERS, "a random state", fits=_generator, state=True, callee_at=1)
_allow("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence", "a random state's seed", fits=_seed, state=True)

# torch's tensors, and what they are made of.
_allow("torch", [kind.label for kind in ElementType], "an element type")
_allow(
    "torch",
    "half float double int long short chalf cfloat cdouble complex32 quint8 qint8 qint32 quint4x2 quint2x4 "
    "bits8 bits16 bits1x8 bits2x4 bits4x2 uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 "
    "int7 float4_e2m1fn_x2 float8_e8m0fnu",
    "an element type",
)
_STORAGES = (
    "DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage ShortStorage CharStorage "
    "ByteStorage BoolStorage ComplexDoubleStorage ComplexFloatStorage"
)
_allow("torch", f"{_STORAGES} QUInt8Storage QInt8Storage QInt32Storage QUInt4x2Storage QUInt2x4Storage", _STORAGE)
_allow("torch.cuda", _STORAGES, _STORAGE)
for _module in ("torch", "torch.storage"):
    _allow(_module, "UntypedStorage TypedStorage", _STORAGE)
_allow(
    "torch",
    "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc jagged per_tensor_affine "
    "per_channel_affine preserve_format contiguous_format channels_last channels_last_3d",
    "a layout",
)
_allow("torch.serialization", "_get_layout", "a layout by its name", fits=_words)
_allow("torch", "Size", "a shape", fits=_sizes, value=True)
_allow("torch", "device", "a device by its name", fits=_words, value=True)
_allow("torch", "Tensor", _KIND)
_allow("torch._tensor", "Tensor", _KIND)
_allow("torch.nn.parameter", "Parameter Buffer", _KIND)
_allow(
    "torch._utils",
    "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_qtensor",
    _TENSOR,
    fits=_no_hooks,
)
_allow(
    "torch._utils",
    "_rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_nested_tensor "
    "_rebuild_meta_tensor_no_storage _rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy",
    _TENSOR,
    call=True,
)
_allow("torch._utils", "_rebuild_parameter_with_state", _TENSOR, fits=_with_state)
_allow("torch._utils", "_rebuild_wrapper_subclass", _TENSOR, fits=_wrapper)
for _module in ("torch._tensor", "torch.tensor"):  # torch.load reads the second as the first
    _allow(_module, "_rebuild_from_type_v2", "a tensor of a class that torch has", fits=_retyped, callee_at=0)
_OPENED = "a file of torch.save, which is read as well"
_allow("torch.storage", "_load_from_bytes", _OPENED, nested="opened", fits=_one_literal)

# Functions of numbers and tensors alone, which configurations name as activations, losses or measures. Where the name
# leads to a builtin, Python writes the module of that: of F.gelu torch._C._nn.
_POINTWISE = (
    "acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor isfinite isinf isnan lgamma log "
    "log10 log1p log2 pow sin sinh sqrt tan tanh trunc"
)
_LOSSES = (
    "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss "
    "gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss "
    "multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss "
    "triplet_margin_loss"
)
_LAYERS = (
    "adaptive_avg_pool2d adaptive_avg_pool3d alpha_dropout batch_norm dropout embedding group_norm instance_norm "
    "interpolate layer_norm linear normalize one_hot pad rms_norm scaled_dot_product_attention"
)
_NONLINEAR = (
    "celu elu glu gumbel_softmax hardsigmoid hardswish hardtanh hardtanh_ leaky_relu leaky_relu_ log_softmax "
    "logsigmoid mish prelu relu relu6 relu_ rrelu rrelu_ selu selu_ sigmoid silu softmax softmin softplus softshrink "
    "softsign tanh tanhshrink _threshold"
)
FUNCTIONS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "math": f"{_POINTWISE} atan2 copysign degrees fabs fmod hypot isclose ldexp radians",
        "numpy": "absolute ceil cos cosh exp exp2 expm1 floor log log10 log1p log2 maximum minimum sign "
        "sin sinh sqrt square tan tanh",
        "torch": f"{_POINTWISE} "
        "abs adaptive_avg_pool1d add argmax argmin avg_pool1d bilinear celu celu_ clamp conv1d conv2d conv3d "
        "cosine_similarity div dropout eq ge gt hardshrink layer_norm le log_softmax logit logsumexp lt matmul max "
        "maximum mean median min minimum mul ne neg norm pairwise_distance prelu prod reciprocal relu relu_ rms_norm "
        "rrelu rrelu_ rsqrt selu selu_ sigmoid sigmoid_ sign softmax square std sub sum tanh_ threshold threshold_ "
        "var",
        "torch._C._nn": "avg_pool2d avg_pool3d binary_cross_entropy elu elu_ gelu gelu_ glu hardsigmoid "
        "hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ huber_loss l1_loss leaky_relu "
        "leaky_relu_ linear log_sigmoid mish mish_ mse_loss nll_loss one_hot pad relu6 relu6_ "
        "scaled_dot_product_attention silu silu_ smooth_l1_loss soft_margin_loss softplus "
        "softshrink",
        "torch._C._special": "special_erf special_erfc special_expit special_log_softmax special_softmax special_xlogy",
        "torch.nn.functional": f"{_LOSSES} {_NONLINEAR} {_LAYERS}",
    }.items()
    for name in names.split()
)
_SIGNALS = (
    "ABRT ALRM BUS CHLD CLD CONT FPE HUP ILL INT IO IOT KILL PIPE POLL PROF PWR QUIT RTMAX RTMIN SEGV STKFLT STOP SYS "
    "TERM TRAP TSTP TTIN TTOU URG USR1 USR2 VTALRM WINCH XCPU XFSZ"
)
SIGNALS = frozenset(f"signal.SIG{name}" for name in _SIGNALS.split())
for _module, _, _name in (dotted.rpartition(".") for dotted in sorted(SIGNALS)):
    _allow(_module, _name, "the number of a signal, as Python 3.11.0 to 3.11.3 pickle it")
for _module, _, _name in (dotted.rpartition(".") for dotted in sorted(FUNCTIONS)):
    _allow(_module, _name, "a function of numbers, that stands for itself and is not called")
_allow(
    "functools",
    "partial",
    "one of these functions with numbers and words for some arguments; it is not called",
    fits=_inert,
    state=True,
    fits_state=_inert_state,
)
_allow("torch._C", "_VariableFunctionsClass", "the builtins of torch, of which one is named", fits=_never)

# torch.distributed: DTensors, and the directory of torch.distributed.checkpoint.
for _module in ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._tensor.api"):
    _allow(_module, "DTensor", _KIND)
for _module in ("torch.distributed.device_mesh", "torch.distributed._tensor.device_mesh"):
    _objects(_module, "DeviceMesh", "the mesh of a DTensor")
_objects("torch.distributed._mesh_layout", "_FlatLayout _MeshLayout", "the mesh of a DTensor")
_SPECS = "DTensorSpec TensorMeta"
for _module in ("torch.distributed.tensor", "torch.distributed._tensor"):
    _objects(f"{_module}.placement_types", f"Shard Replicate Partial _StridedShard {_SPECS}", "how a DTensor lies")
    _objects(f"{_module}._dtensor_spec", f"{_SPECS} ShardOrderEntry", "how a DTensor lies")
_DIRECTORY = "the directory of torch.distributed.checkpoint"
_objects(
    "torch.distributed.checkpoint.metadata",
    "Metadata TensorStorageMetadata BytesStorageMetadata MetadataIndex "
    "ChunkStorageMetadata TensorProperties StorageMeta",
    _DIRECTORY,
)
_enums("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "torch.distributed.checkpoint")
_objects("torch.distributed.checkpoint.filesystem", "_StorageInfo _StoragePrefix", _DIRECTORY)
_objects("torch.distributed.checkpoint.planner", "SavePlan WriteItem TensorWriteData BytesIOWriteData", _DIRECTORY)
_enums("torch.distributed.checkpoint.planner", "WriteItemType", "torch.distributed.checkpoint")
_STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"  # dataclasses there, core 0.10 to 0.15
_objects(_STRATEGIES, "MCoreMetadata MCoreSavePlan", "the same, by Megatron-LM up to core 0.15")

# DeepSpeed.
_objects("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler", "DeepSpeed's loss scale")
_objects("deepspeed.utils.tensor_fragment", "fragment_address", "DeepSpeed's slices of flat buffers")
_objects("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", "DeepSpeed's tensors of several parts")
_enums("deepspeed.runtime.zero.config", "ZeroStageEnum", "DeepSpeed")
_enums("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum", "DeepSpeed")

# Megatron-LM: its enums, in the arguments that it saves.
_enums("megatron.core.enums", "ModelType Fp8Recipe Fp4Recipe", "Megatron-LM")
_enums(
    "megatron.core.transformer.enums",
    "ModelType LayerType AttnType AttnMaskType AttnBackend CudaGraphScope CudaGraphModule InferenceCudaGraphScope",
    "Megatron-LM",
)
_enums("megatron.core.rerun_state_machine", "RerunMode RerunState RerunDiagnostic RerunValidationStatus", "Megatron-LM")
_enums(
    "megatron.core.inference.config",
    "KVCacheManagementMode PrefixCachingEvictionPolicy "
    "PrefixCachingCoordinatorPolicy CudaGraphSizingDistribution AsyncScheduleMode",
    "Megatron-LM",
)
_enums("megatron.core.inference.moe", "InferenceGroupedGemmBackend", "Megatron-LM")
_enums("megatron.core.datasets.utils", "Split", "Megatron-LM")

# nanotron, accelerate and Hugging Face's Trainer.
_objects("nanotron.random", "RandomState RandomStates", "nanotron's random states")
_objects("accelerate.state", "PartialState AcceleratorState GradientState", "accelerate's state, in training_args.bin")
_objects(
    "accelerate.utils.dataclasses",
    "DeepSpeedPlugin FullyShardedDataParallelPlugin TorchDynamoPlugin "
    "GradientAccumulationPlugin DataLoaderConfiguration ProjectConfiguration",
    "in training_args.bin",
)
_objects("accelerate.parallelism_config", "ParallelismConfig", "in training_args.bin")
_enums(
    "accelerate.utils.dataclasses",
    "DistributedType DynamoBackend PrecisionType RNGType ComputeEnvironment "
    "LoggerType FP8BackendType DDPCommunicationHookType",
    "accelerate",
)
for _module in ("transformers.integrations.deepspeed", "transformers.deepspeed"):
    _objects(_module, "HfTrainerDeepSpeedConfig HfDeepSpeedConfig", "in training_args.bin")
_objects("transformers.training_args", "TrainingArguments", "training_args.bin")
_objects("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments", "training_args.bin")
_objects("transformers.generation.configuration_utils", "GenerationConfig", "in training_args.bin")
_objects("transformers.trainer_pt_utils", "AcceleratorConfig", "in training_args.bin")
_enums("transformers.training_args", "OptimizerNames ParallelMode", "transformers")
_enums(
    "transformers.trainer_utils",
    "IntervalStrategy SaveStrategy EvaluationStrategy HubStrategy SchedulerType FSDPOption HPSearchBackend",
    "transformers",
)
_enums("transformers.debug_utils", "DebugOption", "transformers")

ALLOWED: Mapping[tuple[str, str], Allowed] = MappingProxyType(_TABLE)
"""Every name that a pickle may use unasked, by module and name."""
