"""Attention for a TPU, written in Pallas: the scores never leave the core, forward or backward.

Tensors are (batch, heads, width, tokens): with the tokens along a vector register's 128 lanes a
narrow head fills whole registers, in memory and in the core, and what is kept for each query (its
log-sum) is one number, not one number repeated over the lanes. Scores are made transposed, (keys,
queries), so that every product but the score itself reads its operands as they lie.
The backward pass is that of FlashAttention-2 (Dao, 2023), in one kernel: five products a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MASKED = -1e30
"""Below any score; finite, so that its difference to another is a number."""


def forward(
    query: Any, key: Any, value: Any, *, tiles: Sequence[int], causal: bool
) -> Any:
    """softmax(query key^T / sqrt(width)) value, and the log of each query's sum of exponentials.

    query (batch, heads, width, queries), key and value (batch, heads, width, keys) -> the same as
    query, and (batch, heads, 1, queries) in float32. tiles: sizes of a tile, the largest that
    divides the tokens is taken.
    """
    batch, heads, width, queries = query.shape
    keys = key.shape[-1]
    tile, key_tile = _tile(queries, tiles), _tile(keys, tiles)
    ours = pl.BlockSpec((None, None, width, tile), lambda b, h, i: (b, h, 0, i))
    every_key = pl.BlockSpec((None, None, width, keys), lambda b, h, i: (b, h, 0, 0))
    one_a_query = pl.BlockSpec((None, None, 1, tile), lambda b, h, i: (b, h, 0, i))
    return pl.pallas_call(
        functools.partial(_forward_tile, tile=key_tile, causal=causal),
        grid=(batch, heads, queries // tile),
        in_specs=[ours, every_key, every_key],
        out_specs=[ours, one_a_query],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32),
        ],
        compiler_params=_in_any_order("parallel", "parallel", "arbitrary"),
    )(query, key, value)


def _forward_tile(
    query: Any, key: Any, value: Any, output: Any, log_sum: Any, *, tile: int, causal: bool
) -> None:
    """One tile of queries against all keys, the softmax's maximum and sum carried along."""
    number = pl.program_id(2)
    ours = query[...]
    width, queries = ours.shape
    scale = width**-0.5

    def add(index: Any, carried: Any, *, masked: bool = False) -> Any:
        largest, total, summed = carried
        keys = pl.ds(pl.multiple_of(index * tile, tile), tile)
        scores = _products_over_width(key[:, keys], ours)
        if masked:
            scores = _mask(scores)
        higher = jnp.maximum(largest, jnp.max(scores, axis=0, keepdims=True))
        weights = jnp.exp((scores - higher) * scale)
        kept = jnp.exp((largest - higher) * scale)
        total = kept * total + jnp.sum(weights, axis=0, keepdims=True)
        summed = kept * summed + _product(value[:, keys], weights.astype(ours.dtype))
        return higher, total, summed

    start = (
        jnp.full((1, queries), MASKED, jnp.float32),
        jnp.zeros((1, queries), jnp.float32),
        jnp.zeros((width, queries), jnp.float32),
    )
    tiles = number if causal else key.shape[-1] // tile
    carried = lax.fori_loop(0, tiles, add, start)
    largest, total, summed = add(number, carried, masked=True) if causal else carried
    output[...] = (summed / total).astype(output.dtype)
    log_sum[...] = largest * scale + jnp.log(total)


def backward(
    query: Any, key: Any, value: Any, output: Any, log_sum: Any, gradient: Any,
    *, tiles: Sequence[int], causal: bool,
) -> Any:  # fmt: skip
    """Gradients of query, key and value; gradient is the output's. Shapes as in `forward`."""
    batch, heads, width, queries = query.shape
    keys = key.shape[-1]
    tile, query_tile = _tile(keys, tiles), _tile(queries, tiles)
    ours = pl.BlockSpec((None, None, width, tile), lambda b, h, j: (b, h, 0, j))
    every_query = pl.BlockSpec((None, None, width, queries), lambda b, h, j: (b, h, 0, 0))
    one_a_query = pl.BlockSpec((None, None, 1, queries), lambda b, h, j: (b, h, 0, 0))
    return pl.pallas_call(
        functools.partial(_backward_tile, tile=query_tile, causal=causal),
        grid=(batch, heads, keys // tile),
        in_specs=[every_query, ours, ours, every_query, one_a_query, every_query],
        out_specs=[every_query, ours, ours],
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in (query, key, value)],
        scratch_shapes=[
            pltpu.VMEM((width, queries), jnp.float32),
            pltpu.VMEM((1, queries), jnp.float32),
        ],
        compiler_params=_in_any_order("parallel", "parallel", "arbitrary"),
    )(query, key, value, output, log_sum, gradient)


def _backward_tile(
    query: Any, key: Any, value: Any, output: Any, log_sum: Any, gradient: Any,
    of_query: Any, of_key: Any, of_value: Any, query_sum: Any, products: Any,
    *, tile: int, causal: bool,
) -> None:  # fmt: skip
    """One tile of keys against all queries; the queries' gradients add up from tile to tile."""
    number = pl.program_id(2)
    keys, values = key[...], value[...]
    width, count = keys.shape
    scale = width**-0.5

    @pl.when(number == 0)
    def _() -> None:
        query_sum[...] = jnp.zeros_like(query_sum)
        both = output[...].astype(jnp.float32) * gradient[...].astype(jnp.float32)
        products[...] = jnp.sum(both, axis=0, keepdims=True)

    def add(index: Any, carried: Any, *, masked: bool = False) -> Any:
        key_sum, value_sum = carried
        ours = pl.ds(pl.multiple_of(index * tile, tile), tile)
        queries, ways = query[:, ours], gradient[:, ours]
        scores = _products_over_width(keys, queries) * scale - log_sum[:, ours]
        if masked:
            scores = _mask(scores)
        weights = jnp.exp(scores)
        value_sum += _product_over_queries(ways, weights.astype(ways.dtype))
        changes = weights * (_products_over_width(values, ways) - products[:, ours])
        changes = changes.astype(keys.dtype)
        key_sum += _product_over_queries(queries, changes)
        query_sum[:, ours] += _product(keys, changes)
        return key_sum, value_sum

    zeros = jnp.zeros((width, count), jnp.float32)
    carried = zeros, zeros
    if causal:
        carried = add(number, carried, masked=True)
    first = number + 1 if causal else 0
    key_sum, value_sum = lax.fori_loop(first, query.shape[-1] // tile, add, carried)
    of_key[...] = (key_sum * scale).astype(of_key.dtype)
    of_value[...] = value_sum.astype(of_value.dtype)

    @pl.when(number == pl.num_programs(2) - 1)
    def _() -> None:
        of_query[...] = (query_sum[...] * scale).astype(of_query.dtype)


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


def _mask(scores: Any) -> Any:
    """Scores of a tile on the diagonal, those of later keys masked."""
    keys = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    queries = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.where(keys <= queries, scores, MASKED)


def _tile(tokens: int, tiles: Sequence[int]) -> int:
    return next(size for size in tiles if tokens % size == 0)


def _in_any_order(*axes: str) -> Any:
    return pltpu.CompilerParams(dimension_semantics=axes)
