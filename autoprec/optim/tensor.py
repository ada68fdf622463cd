"""A tensor that looks like FP32 and is stored in fewer bits.

``StoredTensor`` is a wrapper subclass: shape, dtype, autograd, ``state_dict`` keys and ``isinstance(nn.Parameter)``
are those of the tensor it replaces; its bytes are the codec's parts. Any operation decodes it first; an in-place
operation runs on the exact values and encodes back (rounding to nearest). A copy (``clone``, ``deepcopy``) is a plain
tensor of the exact values: what is averaged in it loses nothing. A *view* of it is a decoded copy: ``weight[0] = 0``
reaches the stored values, ``weight[0].zero_()`` does not. Pickling writes a plain tensor, so checkpoints stay readable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from autoprec.optim.codecs import CastCodec, Codec, PairCodec

aten = torch.ops.aten


class StoredTensor(torch.Tensor):
    """A floating-point tensor held as ``codec`` parts.

    Build it with :meth:`store`. ``parts`` are the live storage; :meth:`decode` returns a fresh FP32 copy,
    :meth:`assign` overwrites the stored values in place.
    """

    codec: Codec
    parts: tuple[Tensor, ...]

    @staticmethod
    def __new__(
        cls, parts: tuple[Tensor, ...], codec: Codec, shape: torch.Size, dtype: torch.dtype = torch.float32
    ) -> StoredTensor:
        made: StoredTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts[0].device)
        made.parts, made.codec = parts, codec
        return made

    @classmethod
    def store(cls, values: Tensor, codec: Codec, generator: torch.Generator | None = None) -> StoredTensor:
        """Encode ``values`` (plain tensor); the result keeps their shape and dtype.

        Args:
            values: of any shape and float dtype.
            codec: the format.
            generator: of the noise of stochastic rounding; None rounds to nearest.
        """
        return cls(codec.encode(values.detach(), generator), codec, values.shape, values.dtype)

    def decode(self) -> Tensor:
        """Return the values as a fresh FP32 tensor of the same shape."""
        return self.codec.decode(self.parts, self.shape)

    def exact(self) -> Tensor:
        """Return what the optimizer updates and a checkpoint holds, FP32 of the same shape."""
        return self.codec.exact(self.parts, self.shape) if isinstance(self.codec, PairCodec) else self.decode()

    def assign(self, values: Tensor, generator: torch.Generator | None = None) -> None:
        """Overwrite the stored values in place with ``values`` (FP32, same shape)."""
        for part, fresh in zip(self.parts, self.codec.encode(values, generator), strict=True):
            part.copy_(fresh.view(part.shape))

    # ---------------------------------------------------------------- what torch does in C++, past the dispatcher
    @property
    def data(self) -> Tensor:
        """Return what shares its bytes and shape and has no history; assigning gives it other bytes, as torch does."""
        return super().data

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise RuntimeError(
                f"a weight of {tuple(self.shape)} that is stored in fewer bits takes no data of {tuple(values.shape)}: "
                "wrap the optimizer after such changes"
            )
        if isinstance(values, StoredTensor) and values.codec == self.codec:
            parts = values.parts
        elif torch.equal(values, decoded(self).to(values.device, values.dtype)):  # read from here, as module.to() does
            parts = self.parts
        else:
            plain = values.exact() if isinstance(values, StoredTensor) else values.detach()
            parts = self.codec.encode(plain.float(), None)
        self.parts = tuple(part.to(values.device) for part in parts)
        if (values.dtype, values.device) != (self.dtype, self.device):
            other = StoredTensor(self.parts, self.codec, self.shape, values.dtype)
            torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write to a part of the stored values."""
        whole = self.exact().to(self.dtype)
        whole[index] = value
        self.copy_(whole)

    # ---------------------------------------------------------------- what reads bytes: NumPy, safetensors, loggers
    def numpy(self, *, force: bool = False) -> Any:
        """Return what a checkpoint holds, as a NumPy array of its own."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.exact().to(self.dtype).numpy(force=force)

    def tolist(self) -> Any:
        """Return what a checkpoint holds, as nested lists."""
        return self.exact().to(self.dtype).tolist()

    def untyped_storage(self) -> Any:
        """Return bytes that can be read, of an entry of a ``state_dict``; what is written there is lost."""
        return self._shown().untyped_storage() if self._is_entry else super().untyped_storage()

    def data_ptr(self) -> int:
        """Return where bytes can be read, of an entry of a ``state_dict``; 0 for a Parameter."""
        return self._shown().data_ptr() if self._is_entry else super().data_ptr()

    @property
    def _is_entry(self) -> bool:
        """Whether it is a ``state_dict``'s: with a Parameter a wide copy would live for as long as the model."""
        plain = type(self.parts[0]) is torch.Tensor and not torch.compiler.is_compiling()
        return plain and not self.requires_grad and not getattr(self, "_is_param", False)

    def _shown(self) -> Tensor:
        values = self.exact().to(self.dtype)
        held: Tensor = self.__dict__.setdefault("_held", values)  # a pointer must stay valid
        return held if held is values else held.copy_(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return what a checkpoint holds as a plain tensor: an average of weights is kept in copies, in FP32."""
        values = self.exact().to(self.dtype)
        kept: Tensor = torch.nn.Parameter(values, self.requires_grad) if getattr(self, "_is_param", False) else values
        return memo.setdefault(id(self), kept)

    def share_memory_(self) -> Any:
        """Refuse: torch would crash."""
        raise RuntimeError("a weight stored in fewer bits cannot be moved to shared memory")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"StoredTensor({self.codec.name}, shape={tuple(self.shape)}, values={self.decode()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.exact().to(self.dtype)
        kept: Tensor = torch.nn.Parameter(plain, self.requires_grad) if getattr(self, "_is_param", False) else plain
        return kept.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        for index, part in enumerate(self.parts):
            setattr(self, f"_part{index}", part)
        context = {"codec": self.codec, "dtype": self.dtype, "count": len(self.parts)}
        return [f"_part{index}" for index in range(len(self.parts))], context

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: dict[str, Any], outer_size: torch.Size, _stride: Any
    ) -> StoredTensor:
        parts = tuple(inner[f"_part{index}"] for index in range(context["count"]))
        return cls(parts, context["codec"], outer_size, context["dtype"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None and isinstance(args[0], StoredTensor):
            found = special(args[0], kwargs)
            if found is not None:
                return found
        return _run_decoded(func, args, kwargs)


def _alias(tensor: StoredTensor, _kwargs: dict[str, Any]) -> StoredTensor:
    return StoredTensor(tensor.parts, tensor.codec, tensor.shape, tensor.dtype)


def _clone(tensor: StoredTensor, _kwargs: dict[str, Any]) -> Tensor:
    return tensor.exact().to(tensor.dtype)


def _to_copy(tensor: StoredTensor, kwargs: dict[str, Any]) -> Tensor | None:
    """Casting a BF16-stored weight to BF16 (what autocast and a BF16 GEMM do) is free: the storage itself."""
    part, codec = tensor.parts[0], tensor.codec
    same_place = kwargs.get("device") in (None, part.device)
    unscaled = isinstance(codec.compute if isinstance(codec, PairCodec) else codec, CastCodec)
    if unscaled and kwargs.get("dtype") == part.dtype and same_place:
        return part.view(tensor.shape)
    return None


_SPECIAL: dict[Any, Callable[[StoredTensor, dict[str, Any]], Tensor | None]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
}


def decoded(value: Any) -> Any:
    """Return ``value`` with a StoredTensor replaced by its plain values (dtype kept); anything else as it is."""
    return value.decode().to(value.dtype) if isinstance(value, StoredTensor) else value


def _run_decoded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on plain values; encode back what it wrote to and return the original in its place."""
    plain: dict[int, tuple[StoredTensor, Tensor]] = {}
    writes = func._schema.is_mutable  # an average of weights, clipping: of exact values, and not of rounded ones

    def open_(value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return value
        if id(value) not in plain:
            plain[id(value)] = (value, value.exact().to(value.dtype) if writes else decoded(value))
        return plain[id(value)][1]

    result = func(*tree_map(open_, args), **tree_map(open_, kwargs))
    if not writes:
        return result
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    for argument, value in given:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for target in value if isinstance(value, list | tuple) else (value,):
                if id(target) in plain:
                    target.assign(plain[id(target)][1].float())
    back = {id(values): stored for stored, values in plain.values()}
    return tree_map(lambda value: back.get(id(value), value), result)
