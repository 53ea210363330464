"""Watch the tensors that operations make: the largest one, and the memory that stays alive."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Within it, `num_elements` is the size of the largest tensor that any operation made; views are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0
        self.operation = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _made((args, kwargs), result):
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            if size > self.num_elements:
                self.num_elements, self.operation = size, str(func)
        return result


class LivingStorages(TorchDispatchMode):
    """Within it, every storage that an operation makes is remembered weakly; `num_bytes` adds up those still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _made((args, kwargs), result):
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def num_bytes(self) -> int:
        """Bytes of the storages made within that are alive now."""
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def _made(given: Any, result: Any) -> list[Tensor]:
    """The tensors of a result that share no memory with what the operation was given."""
    old = {leaf.untyped_storage()._cdata for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in old]
