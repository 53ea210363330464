"""Numbers that travel in 4 or 8 bits between replicas (ZeRO++, Wang et al. 2023, sections 3.1 and 3.3).

    a block      256 neighbours    scale = largest magnitude / most      code = number / scale, rounded, -most .. most
    a message    scales, fp32 | codes, a byte each or two in one         most = 127 in 8 bits, 7 in 4

Gradients go by one all-to-all, every rank's share of each to its owner, and are added up there in fp32, in the order of
the ranks: each is rounded once, whatever the number of ranks, where a reduce-scatter in few bits would round the sum
at every hop. Over nodes there may be two all-to-alls: among the ranks of a node, to the one that stands where the owner
stands in its own; and their sums, rounded again, between these. A byte leaves a node once then, not once a rank. A
block with a number that is not finite comes out as numbers that are not, so a norm tells.

Rounding is to the nearest: two ranks that round the same numbers get the same, and so does a run that is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.schema import PrecisionConfig
from megalite.engine.wire_bytes import BLOCK, PIECE_BLOCKS, SCALE_BYTES, message_bytes

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Wire:
    """How gradients and weights travel between replicas."""

    dtype: torch.dtype = torch.float32
    """Of gradients, where they are not rounded to bits; of their sums, where all replicas need them."""
    reduce_bits: int | None = None
    """Of a gradient."""
    gather_bits: int | None = None
    """Of a weight."""

    @property
    def has_blocks(self) -> bool:
        """Whether anything is rounded in blocks."""
        return self.reduce_bits is not None or self.gather_bits is not None


PLAIN = Wire()


def choose_wire(precision: PrecisionConfig) -> Wire:
    """What a config says."""
    return Wire(WIRE_DTYPES[precision.reduce_dtype or "fp32"], precision.reduce_bits, precision.gather_bits)


def pack(numbers: Tensor, bits: int, num_rows: int = 1) -> Tensor:
    """Round numbers, and write them as messages.

    Args:
        numbers: `[rows x n]`, n of whole blocks.
        bits: 4 or 8.
        num_rows: messages that they become, equally long.

    Returns:
        bytes, `[rows, bytes]`.
    """
    blocks = numbers.detach().view(num_rows, -1, BLOCK)
    num_blocks = blocks.shape[1]
    message = numbers.new_empty((num_rows, message_bytes(num_blocks * BLOCK, bits)), dtype=torch.uint8)
    scales, codes = _parts(message, bits)
    for piece in _pieces(num_rows, num_blocks):
        some = blocks[:, piece].float()
        scale = some.abs().amax(-1) / _most(bits)
        scales[:, piece] = scale
        divisor = torch.where(scale > 0.0, scale, 1.0)  # of zeros, and of what is not finite
        rounded = (some / divisor.unsqueeze(-1)).round_().clamp_(-_most(bits), _most(bits))
        codes[:, piece] = _to_bytes(rounded, bits)
    return message


def unpack(message: Tensor, bits: int, out: Tensor) -> None:
    """Write the numbers of messages, `[rows, bytes]`, one after the other: `[rows x n]`."""
    blocks = out.view(message.shape[0], -1, BLOCK)
    for piece, numbers in _numbers(message, bits):
        blocks[:, piece] = numbers.to(out.dtype)


def add_up(message: Tensor, bits: int | None, out: Tensor) -> None:
    """Write the sums of the numbers of messages, `[rows, bytes]`, or as they are, `[rows x n]`: `[n]`, in the order of
    the rows."""
    if bits is None:
        first, *others = message.view(-1, out.numel())
        out.copy_(first)
        for row in others:
            out += row
        return
    blocks = out.view(-1, BLOCK)
    for piece, numbers in _numbers(message, bits):
        total = numbers[0]
        for number in numbers[1:]:
            total += number
        blocks[piece] = total


def by_neighbour(numbers: Tensor, num_nodes: int, num_near: int) -> Tensor:
    """Runs of numbers, one for each rank, node by node, in the order of the ranks' places in their nodes.

    Args:
        numbers: `[nodes x near x run]`.

    Returns:
        `[near x nodes x run]`.
    """
    return numbers.view(num_nodes, num_near, -1).transpose(0, 1).reshape(-1)


def padded(numbers: Tensor, sizes: Sequence[int], num_rows: int = 1) -> Tensor:
    """Tensors that lie end to end, each with zeros behind it so that blocks are of one tensor: `[rows x sum]`, in each
    row the tensors of these sizes."""
    rows = numbers.view(num_rows, -1)
    found = numbers.new_zeros((num_rows, padded_size(sizes)))
    begin = 0
    for size, part in zip(sizes, rows.split(list(sizes), dim=1), strict=True):
        found[:, begin : begin + size] = part
        begin += whole_blocks(size)
    return found.view(-1)


def cut_padding(numbers: Tensor, sizes: Sequence[int], out: Tensor, num_rows: int = 1) -> None:
    """The way back."""
    rows, whole = numbers.view(num_rows, -1), out.view(num_rows, -1)
    begin = 0
    for size, part in zip(sizes, whole.split(list(sizes), dim=1), strict=True):
        part.copy_(rows[:, begin : begin + size])
        begin += whole_blocks(size)


def padded_size(sizes: Sequence[int]) -> int:
    """Numbers of a row of `padded`."""
    return sum(map(whole_blocks, sizes))


def whole_blocks(size: int) -> int:
    """Numbers of the blocks that so many numbers need."""
    return -(-size // BLOCK) * BLOCK


def _most(bits: int) -> int:
    """The largest code."""
    return 2 ** (bits - 1) - 1


def _parts(message: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Views of messages: scales `[rows, blocks]`, and codes `[rows, blocks, bytes of a block]`."""
    num_blocks = message.shape[1] // message_bytes(BLOCK, bits)
    border = num_blocks * SCALE_BYTES
    scales = message[:, :border].view(torch.float32)
    return scales, message[:, border:].unflatten(1, (num_blocks, BLOCK * bits // 8))


def _pieces(num_rows: int, num_blocks: int) -> list[slice]:
    step = max(1, PIECE_BLOCKS // num_rows)
    return [slice(first, min(first + step, num_blocks)) for first in range(0, num_blocks, step)]


def _numbers(message: Tensor, bits: int) -> Iterator[tuple[slice, Tensor]]:
    """Piece by piece, which blocks they are and their numbers in fp32, `[rows, blocks, BLOCK]`."""
    scales, codes = _parts(message, bits)
    for piece in _pieces(*scales.shape):
        yield piece, _from_bytes(codes[:, piece], bits) * scales[:, piece].unsqueeze(-1)


def _to_bytes(rounded: Tensor, bits: int) -> Tensor:
    """Codes as bytes; of 4 bits the second half of a block lies in the upper halves of its bytes."""
    if bits == 8:
        return rounded.to(torch.int8).view(torch.uint8)
    low, high = (rounded + 8.0).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def _from_bytes(codes: Tensor, bits: int) -> Tensor:
    """The way back, in fp32."""
    if bits == 8:
        return codes.view(torch.int8).float()
    return torch.cat((codes & 15, codes >> 4), dim=-1).float() - 8.0
