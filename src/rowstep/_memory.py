"""The memory under a tensor: where it is, whether all of it is there, and whether every number has its own place."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from ._waiting import plain_class


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage reaches as far as the tensor says it does."""
    size, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    if tensor.is_contiguous():
        return size >= offset * tensor.itemsize + tensor.nbytes if offset else size >= tensor.nbytes
    return size >= (offset + span(tensor)) * tensor.itemsize


def address_of(tensor: Tensor) -> int | None:
    """Where a tensor begins in this machine's memory, or None if it has no numbers there.

    What only wraps other tensors, as a DTensor does, has an address that means nothing.
    """
    is_plain = plain_class(tensor) in (Tensor, Parameter)
    return tensor.data_ptr() if is_plain and tensor.is_cpu and tensor.numel() else None


def lost_memory(name: str, tensor: Tensor) -> str:
    """What to say of a tensor that has not."""
    return (
        f"the storage of {name} is too small for its shape {tuple(tensor.shape)}: it was freed or resized; "
        "expected it to hold every element"
    )


def span(tensor: Tensor) -> int:
    """How many elements lie between the first and the last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether some of the numbers may lie on top of each other, as those of an expanded tensor do."""
    if tensor.is_contiguous():
        return False
    reached = 0  # from its first number, how far the dimensions of smaller strides go
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reached:
                return True
            reached += (size - 1) * stride
    return False
