"""Sizes, collectives, kernels and peaks read from scheduled programs."""

import resource
from dataclasses import replace

import pytest

from tpukit.hardware.launch import memory_watch
from tpukit.probe.compiler import hlo

PLACE = '{op_name="aten__mul" source_file="/u/model.py" source_line=12}'
PROGRAM = """HloModule m, is_scheduled=true
%inner (p: f32[8,128]) -> f32[8,128] {
  ROOT %p = f32[8,128]{1,0:T(8,128)} parameter(0)
}

ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %big = f32[4096,1024]{1,0:T(8,128)} broadcast(%a), metadata={PLACE}
  %view = f32[1024,4096]{1,0:T(8,128)} bitcast(%big)
  %small = bf16[1000,100]{1,0:T(8,128)(2,1)} reduce(%view), metadata={op_name="aten__sum"}
  %chip = f32[512,512]{1,0:T(8,128)S(1)} copy(%small)
  %sum = f32[1024,1024]{1,0:T(8,128)} all-reduce(%small), to_apply=%inner
  %gather = (f32[8,128]{1,0}, f32[64,128]{1,0}) all-gather-start(%sum), dimensions={0}
  %late = f32[512,1024]{1,0:T(8,128)} add(%sum, %sum)
  ROOT %out = f32[1024,1024]{1,0:T(8,128)} add(%sum, %late)
}
""".replace("{PLACE}", PLACE)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[1024,1024]{1,0:T(8,128)}", 4 * 2**20),
        ("bf16[1000,100]{1,0:T(8,128)(2,1)}", 2 * 1000 * 128),
        ("bf16[1000,100]{0,1:T(8,128)(2,1)}", 2 * 1024 * 104),
        ("f32[5]{0:T(1024)}", 4096),
        ("f32[512,512]{1,0:T(8,128)S(1)}", 0),
        ("(f32[2,4]{1,0}, pred[8]{0})", 32 + 8),
        ("f32[]", 4),
    ],
)
def test_bytes_of_a_shape_count_padding(shape, expected):
    assert hlo.shape_bytes(shape) == expected


def test_collectives_are_named_and_weighed():
    counts, size = hlo.collectives(PROGRAM)
    assert counts == {"all-gather": 1, "all-reduce": 1}
    assert size == 4 * 2**20 + 4 * 8 * 128 + 4 * 64 * 128


def test_a_collective_between_on_chip_buffers_still_uses_the_links():
    summed = "  %r = f32[1024]{0:T(1024)S(1)} all-reduce(%x), channel_id=1"
    assert hlo.collectives(summed)[1] == 4096


def test_pieces_of_one_collective_count_once():
    piece = "  %g{n} = f32[8]{{0}} all-gather(%x), channel_id=7, dimensions={{0}}"
    program = "\n".join(piece.format(n=n) for n in range(5))
    assert hlo.collectives(program) == ({"all-gather": 1}, 32)


def test_the_largest_buffers_at_the_peak_and_their_places():
    largest = hlo.largest_buffers(PROGRAM)
    assert [a.size_bytes for a in largest] == [16 * 2**20, 256_000]
    assert largest[0].operator == "aten__mul"
    assert largest[0].place == "/u/model.py:12"
    assert largest[1].place is None


KERNEL = 'custom_call_target="tpu_custom_call"'
QUERY, SUMS = "bf16[2,4,64,1024]{3,2,1,0}", "f32[2,4,1,1024]{3,2,1,0}"
KERNELS = f"""ENTRY %main () -> f32[] {{
  %q = {QUERY} parameter(0)
  %s = {SUMS} parameter(1)
  %f = ({QUERY}, {SUMS}) custom-call(%q, %q, %q), {KERNEL}
  %b = ({QUERY}, {QUERY}, {QUERY}) custom-call(%q, %q, %q, %q, %s, %q), {KERNEL}
  %other = f32[8]{{0}} custom-call(%q), {KERNEL}
}}
"""


def test_attention_kernels_operations_by_formula():
    one = 2 * (2 * 4) * 1024 * 1024 * 64
    assert hlo.kernel_flops(KERNELS) == (2 + 5) * one


REFUSAL = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 16.42G of 15.75G hbm.

  Largest program allocations in hbm:

  1. Size: 1008.00M
     Operator: op_name="aten__softmax" source_file="/u/model.py" source_line=20 source_end_line=20
     Shape: f32[252,1024,1024]{1,2,0:T(8,128)}
     Unpadded size: 1008.00M

  2. Size: 4.50K
     Shape: f32[8]{0}
"""


def test_a_refusal_lists_allocations():
    first, second = hlo.listed_allocations(REFUSAL)
    assert first.size_bytes == 1008 * 2**20
    assert first.place == "/u/model.py:20"
    assert first.shape == "f32[252,1024,1024]"
    assert second.size_bytes == 4608
    assert second.place is None


def test_one_buffer_that_is_too_large_has_the_model_s_line_that_makes_it():
    text = (
        "Allocation (size=34359738368) would exceed memory (size=17179869184) :: #allocation494"
        " [shape = 'f32[512,4,2048,2048]{2,3,1,0:T(8,128)}', space=hbm] :: <no-hlo-instruction>"
    )
    made = "tensor<2048x2048x2048xf32>"
    operations = [
        ("%1 = add : tensor<8x4xf32>", "aten::add, at /u/model.py:3"),
        (f"%2 = copy : {made}", None),
        (f"%3 = dot : (tensor<8x4xf32>) -> {made}", "aten::bmm, at /u/model.py:9"),
    ]
    (found,) = hlo.refused_buffer(text, operations)
    assert (found.place, found.operator) == ("/u/model.py:9", "aten::bmm")
    assert (found.size_bytes, found.shape) == (34359738368, "f32[512,4,2048,2048]")
    assert hlo.refused_buffer(text, operations[:2]) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("15.75G", int(15.75 * 2**30)), ("0B", 0), ("1.00T", 2**40), ("5K", 5120)],
)
def test_sizes_as_libtpu_writes_them(text, expected):
    assert hlo.parse_hbm_size(text) == expected


class LargeText:
    """An executable whose text takes more memory than there is, as libtpu's of EIT."""

    def __init__(self, executable):
        self.executable = executable

    def __getattr__(self, name):
        return getattr(self.executable, name)

    def hlo_modules(self):
        return bytearray(2**29) and self.executable.hlo_modules()


@pytest.mark.slow
def test_memory_is_known_where_the_text_takes_too_much_of_this_machine(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    jax = pytest.importorskip("jax")
    row = jax.ShapeDtypeStruct((1024,), "float32")
    executable = jax.jit(lambda x: x + x).lower(row).compile().runtime_executable()
    whole = hlo.costs_of(executable)
    assert whole.total >= 8192 and whole.largest and not whole.unread
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    free = memory_watch.reserve_bytes() + 2**29
    monkeypatch.setattr(memory_watch, "available_bytes", lambda: free)
    found = hlo.costs_of(LargeText(executable))
    assert found == replace(whole, unread=True, largest=())
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
