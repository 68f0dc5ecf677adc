"""Attention for a TPU, written in Pallas: the scores never leave the core, forward or backward.

Tensors are (batch, heads, width, tokens): with the tokens along a vector register's 128 lanes a
narrow head fills whole registers, in memory and in the core, and what is kept for each query (its
log-sum) is one number, not one number repeated over the lanes. Scores are made transposed, (keys,
queries), so that every product but the score itself reads its operands as they lie.
The backward pass is that of FlashAttention-2 (Dao, 2023), in one kernel: five products a tile.
Several rows of a batch share a step of the grid where a row is short: a step costs as much as a
small tile. A bias stays in the core for all rows of a head, and so does its gradient.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MASKED = -1e30
"""Score of a masked pair: less than any other; finite, so that differences are numbers."""
TOKENS_A_STEP = 2048
"""Maximum tokens of the rows that share a step of the grid."""
MOST_ROWS = 8


def forward(
    query: Any, key: Any, value: Any, *further: Any, tiles: Sequence[int], causal: bool,
    packed: bool = False, interpret: bool = False,
) -> Any:  # fmt: skip
    """softmax(query key^T / sqrt(width) + bias) value, and each query's log-sum of exponentials.

    query (batch, heads, width, queries), key and value (batch, heads, width, keys) -> the same as
    query, and (batch, heads, 1, queries) in float32. further: a bias (heads, keys, queries) in
    float32, or with `packed` the first key that each query attends to, (batch, 1, 1, queries) in
    int32, or nothing. tiles: sizes of a tile, the largest that divides the tokens is taken.
    interpret: as operations of any device instead of a TPU's program.
    """
    batch, heads, width, queries = query.shape
    keys = key.shape[-1]
    tile, key_tile = _tile(queries, tiles), _tile(keys, tiles)
    rows = _rows(batch, max(queries, keys))
    ours = pl.BlockSpec((rows, None, width, tile), lambda h, b, i: (b, h, 0, i))
    every_key = pl.BlockSpec((rows, None, width, keys), lambda h, b, i: (b, h, 0, 0))
    one_a_query = pl.BlockSpec((rows, None, 1, tile), lambda h, b, i: (b, h, 0, i))
    of_further = [
        pl.BlockSpec((rows, None, 1, tile), lambda h, b, i: (b, 0, 0, i))
        if packed
        else pl.BlockSpec((None, keys, tile), lambda h, b, i: (h, 0, i))
    ] * len(further)
    return pl.pallas_call(
        functools.partial(_forward_step, tile=key_tile, causal=causal, packed=packed),
        grid=(heads, batch // rows, queries // tile),
        in_specs=[ours, every_key, every_key, *of_further],
        out_specs=[ours, one_a_query],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32),
        ],
        compiler_params=_order("parallel", "parallel", "parallel"),
        interpret=interpret,
    )(query, key, value, *further)


def _forward_step(
    query: Any, key: Any, value: Any, *rest: Any, tile: int, causal: bool, packed: bool
) -> None:
    """One tile of queries of some rows against all keys, the softmax's maximum and sum carried."""
    *further, output, log_sum = rest
    starts, bias = _split_further(further, packed=packed)
    number = pl.program_id(2)
    rows, width, queries = query.shape

    def attend(row: Any, _: Any) -> None:
        ours = query[row]

        def add(index: Any, carried: Any, *, masked: bool = False) -> Any:
            largest, total, summed = carried
            keys = pl.ds(pl.multiple_of(index * tile, tile), tile)
            scores = _products_over_width(key[row, :, keys], ours) * width**-0.5
            if bias is not None:
                scores += bias[keys, :]
            first_seen = None if starts is None else starts[row]
            scores = _masked(scores, first_seen, index * tile, on_diagonal=masked)
            higher = jnp.maximum(largest, jnp.max(scores, axis=0, keepdims=True))
            weights = jnp.exp(scores - higher)
            kept = jnp.exp(largest - higher)
            total = kept * total + jnp.sum(weights, axis=0, keepdims=True)
            summed = kept * summed + _product(value[row, :, keys], weights.astype(ours.dtype))
            return higher, total, summed

        start = (
            jnp.full((1, queries), MASKED, jnp.float32),
            jnp.zeros((1, queries), jnp.float32),
            jnp.zeros((width, queries), jnp.float32),
        )
        tiles = number if causal else key.shape[-1] // tile
        carried = lax.fori_loop(0, tiles, add, start)
        largest, total, summed = add(number, carried, masked=True) if causal else carried
        output[row] = (summed / total).astype(output.dtype)
        log_sum[row] = largest + jnp.log(total)

    lax.fori_loop(0, rows, attend, None)


def backward(
    query: Any, key: Any, value: Any, output: Any, log_sum: Any, gradient: Any, *further: Any,
    tiles: Sequence[int], causal: bool, packed: bool = False, interpret: bool = False,
) -> Any:  # fmt: skip
    """Gradients of query, key, value and bias; gradient is the output's. Shapes as in `forward`."""
    batch, heads, width, queries = query.shape
    keys = key.shape[-1]
    tile, query_tile = _tile(keys, tiles), _tile(queries, tiles)
    rows = _rows(batch, max(queries, keys))
    ours = pl.BlockSpec((rows, None, width, tile), lambda h, b, j: (b, h, 0, j))
    every_query = pl.BlockSpec((rows, None, width, queries), lambda h, b, j: (b, h, 0, 0))
    one_a_query = pl.BlockSpec((rows, None, 1, queries), lambda h, b, j: (b, h, 0, 0))
    bias = () if packed else further
    of_bias = [pl.BlockSpec((None, keys, queries), lambda h, b, j: (h, 0, 0))] * len(bias)
    of_starts = [pl.BlockSpec((rows, None, 1, queries), lambda h, b, j: (b, 0, 0, 0))] * packed
    return pl.pallas_call(
        functools.partial(_backward_step, tile=query_tile, causal=causal, packed=packed),
        grid=(heads, batch // rows, keys // tile),
        in_specs=[every_query, ours, ours, every_query, one_a_query, every_query, *of_starts,
                  *of_bias],
        out_specs=[every_query, ours, ours, *of_bias],
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in (query, key, value, *bias)],
        scratch_shapes=[
            pltpu.VMEM((rows, width, queries), jnp.float32),
            pltpu.VMEM((rows, 1, queries), jnp.float32),
        ],
        # The bias' gradient adds up over the rows of a head, the queries' over tiles of keys.
        compiler_params=_order("parallel", "arbitrary" if bias else "parallel", "arbitrary"),
        interpret=interpret,
    )(query, key, value, output, log_sum, gradient, *further)  # fmt: skip


def _backward_step(
    query: Any, key: Any, value: Any, output: Any, log_sum: Any, gradient: Any, *rest: Any,
    tile: int, causal: bool, packed: bool,
) -> None:  # fmt: skip
    """One tile of keys of some rows against all queries."""
    has_further = len(rest) > len(("of_query", "of_key", "of_value", "query_sum", "products"))
    starts, bias = _split_further(rest[:has_further], packed=packed)
    of_query, of_key, of_value, *of_bias, query_sum, products = rest[has_further:]
    number = pl.program_id(2)
    rows, width, count = key.shape
    scale = width**-0.5
    our_keys = pl.ds(pl.multiple_of(number * count, count), count)

    @pl.when(number == 0)  # type: ignore[untyped-decorator]
    def _() -> None:
        query_sum[...] = jnp.zeros_like(query_sum)
        both = output[...].astype(jnp.float32) * gradient[...].astype(jnp.float32)
        products[...] = jnp.sum(both, axis=1, keepdims=True)

    @pl.when((number == 0) & (pl.program_id(1) == 0))  # type: ignore[untyped-decorator]
    def _() -> None:
        for summed in of_bias:
            summed[...] = jnp.zeros_like(summed)

    def attend(row: Any, _: Any) -> None:
        keys, values = key[row], value[row]

        def add(index: Any, carried: Any, *, masked: bool = False) -> Any:
            key_sum, value_sum = carried
            ours = pl.ds(pl.multiple_of(index * tile, tile), tile)
            queries, ways = query[row, :, ours], gradient[row, :, ours]
            scores = _products_over_width(keys, queries) * scale - log_sum[row, :, ours]
            if bias is not None:
                scores += bias[our_keys, ours]
            first_seen = None if starts is None else starts[row, :, ours]
            weights = jnp.exp(_masked(scores, first_seen, number * count, on_diagonal=masked))
            value_sum += _product_over_queries(ways, weights.astype(ways.dtype))
            changes = weights * (_products_over_width(values, ways) - products[row, :, ours])
            for summed in of_bias:
                summed[our_keys, ours] += changes
            changes = changes.astype(keys.dtype)
            key_sum += _product_over_queries(queries, changes)
            query_sum[row, :, ours] += _product(keys, changes)
            return key_sum, value_sum

        zeros = jnp.zeros((width, count), jnp.float32)
        first = number + 1 if causal else 0
        carried = lax.fori_loop(first, query.shape[-1] // tile, add, (zeros, zeros))
        # The diagonal comes last: before the loop, libtpu 0.0.21 fails for 128 x 128 tiles.
        key_sum, value_sum = add(number, carried, masked=True) if causal else carried
        of_key[row] = (key_sum * scale).astype(of_key.dtype)
        of_value[row] = value_sum.astype(of_value.dtype)

    lax.fori_loop(0, rows, attend, None)

    @pl.when(number == pl.num_programs(2) - 1)  # type: ignore[untyped-decorator]
    def _() -> None:
        of_query[...] = (query_sum[...] * scale).astype(of_query.dtype)


def _split_further(further: Sequence[Any], *, packed: bool) -> tuple[Any, Any]:
    """(starts, bias): one of them, or neither."""
    one = further[0] if further else None
    return (one, None) if packed else (None, one)


def _products_over_width(key: Any, query: Any) -> Any:
    """(width, keys) and (width, queries) -> (keys, queries)."""
    return _contract(key, query, 0, 0)


def _product(left: Any, right: Any) -> Any:
    """(width, keys) and (keys, queries) -> (width, queries)."""
    return _contract(left, right, 1, 0)


def _product_over_queries(left: Any, right: Any) -> Any:
    """(width, queries) and (keys, queries) -> (width, keys)."""
    return _contract(left, right, 1, 1)


def _contract(left: Any, right: Any, of_left: int, of_right: int) -> Any:
    dimensions = (((of_left,), (of_right,)), ((), ()))
    return lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def _masked(scores: Any, starts: Any, first: Any, *, on_diagonal: bool) -> Any:
    """Scores (keys, queries) of a tile: on the diagonal without later keys, and without those
    before `starts` (1, queries), of keys numbered from `first`.

    A tile that is masked as a whole adds what the tile on the diagonal, the last one, wipes out.
    """
    keys = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    if on_diagonal:
        queries = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(keys <= queries, scores, MASKED)
    return scores if starts is None else jnp.where(keys + first >= starts, scores, MASKED)


def _tile(tokens: int, tiles: Sequence[int]) -> int:
    return next(size for size in tiles if tokens % size == 0)


def _rows(batch: int, tokens: int) -> int:
    """How many rows of a batch one step of the grid takes."""
    most = min(MOST_ROWS, max(1, TOKENS_A_STEP // tokens))
    return next(rows for rows in range(most, 0, -1) if batch % rows == 0)


def _order(*axes: str) -> Any:
    return pltpu.CompilerParams(dimension_semantics=axes)
