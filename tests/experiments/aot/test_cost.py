"""Kernels, loops and bytes are counted in the text of a program."""

import pathlib

import jax
import pytest

from experiments.aot import cost, hlo, targets
from experiments.errors import UserError

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (p.0: f32[8,4], p.1: f32[1,4]) -> f32[8,4] {
  %p.0 = f32[8,4]{1,0} parameter(0)
  %p.1 = f32[1,4]{1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %update = f32[8,4]{1,0} dynamic-update-slice(%p.0, %p.1, %zero, %zero)
}

%condition (c: (s32[], f32[8,4])) -> pred[] {
  %c = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(7)
  %none = s32[] constant(2147483647)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (b: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %b = (s32[], f32[8,4]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%b), index=1
  %row = f32[1,4]{1,0:S(1)} slice(%x), slice={[0:1], [0:4]}
  %new = f32[8,4]{1,0} fusion(%x, %row), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%j, %new)
}

%short (s: f32[8,4]) -> f32[8,4] {
  %s = f32[8,4]{1,0} parameter(0)
  ROOT %same = f32[8,4]{1,0} copy(%s)
}

%long (l: f32[8,4]) -> f32[8,4] {
  %l = f32[8,4]{1,0} parameter(0)
  %once = f32[8,4]{1,0} copy(%l)
  ROOT %twice = f32[8,4]{1,0} copy(%once)
}

ENTRY %main (a: f32[8,4], n: pred[]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %n = pred[] parameter(1)
  %start = s32[] constant(0)
  %init = (s32[], f32[8,4]{1,0}) tuple(%start, %a)
  %loop = (s32[], f32[8,4]{1,0}) while(%init), condition=%condition, body=%body
  %out = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %sum = f32[8,4]{1,0} all-reduce(%out), replica_groups={}, to_apply=%short
  ROOT %end = f32[8,4]{1,0} conditional(%n, %sum, %sum), \
branch_computations={%short, %long}
}
"""


class Compiled:
  """What `cost_of` needs of a `jax.stages.Compiled`."""

  temp_size_in_bytes = 5
  argument_size_in_bytes = 129
  output_size_in_bytes = 128
  alias_size_in_bytes = 100

  def __init__(self, text=PROGRAM):
    self.text = text

  def as_text(self):
    return self.text

  def memory_analysis(self):
    return self


def test_loops_count_as_often_as_they_run():
  program = hlo.parse(PROGRAM)
  counts = {i.name: times for _, i, times in program.executed()}
  assert counts["new"] == 7
  assert counts["sum"] == 1


def test_attributes_of_an_instruction_may_have_line_breaks():
  attributes = (
    "), frontend_attributes={kernel_metadata={\n"
    '"size": "8"\n'
    '}}, backend_config={"estimated_cycles":"70"}'
  )
  before = "ROOT %twice = f32[8,4]{1,0} copy(%once"
  program = hlo.parse(PROGRAM.replace(before + ")", before + attributes))
  once, twice = program.computations["long"][1:]
  assert (once.name, twice.name) == ("once", "twice")
  assert twice.number(r'"estimated_cycles":"(\d+)"') == 70
  names = [i.name for _, i, _ in program.executed()]
  assert names[-3:] == ["l", "once", "twice"]


def test_the_longest_branch_of_a_conditional_runs():
  names = [i.name for _, i, _ in hlo.parse(PROGRAM).executed()]
  assert "twice" in names
  assert "same" not in names


def test_cost_counts_kernels_slices_and_collectives():
  found = cost.cost_of(Compiled(), 1.0, target=targets.TARGETS["h100"])
  # 7 slices, 7 updates, an all-reduce and two copies.
  assert found.kernels == 7 + 7 + 1 + 2
  assert found.copies == 7 + 2
  # A slice reads 16 bytes and writes on-chip memory, which does not count; an
  # update writes 16 bytes in place; each of the others moves 256 bytes.
  assert found.traffic == 7 * 16 + 7 * 16 + 3 * 256
  assert found.collectives == {"all-reduce": (1, 128)}
  assert found.memory == 129 + 28 + 5


COLLECTIVES = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[8], b: f32[2,2]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  %b = f32[2,2]{1,0} parameter(1)
  %many = ((f32[8]{0}, f32[2,2]{1,0}), (f32[32]{0}, f32[8,2]{1,0})) \
all-gather-start(%a, %b), replica_groups=[2,4]<=[8], dimensions={0}
  %gathered = (f32[32]{0}, f32[8,2]{1,0}) all-gather-done(%many)
  %sums = (f32[8]{0}, f32[2,2]{1,0}) all-reduce-start(%a, %b), \
replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %part = f32[2]{0} reduce-scatter(%a), replica_groups={{0,1,2,3},{4,5,6,7}}
  %one = (f32[8]{0}, f32[8]{0}, u32[], u32[]) \
collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  ROOT %end = f32[32]{0} get-tuple-element(%gathered), index=0
}
"""


def test_collectives_count_the_larger_of_operands_and_results():
  program, target = Compiled(COLLECTIVES), targets.TARGETS["h100"]
  found = cost.cost_of(program, 1.0, target=target)
  assert found.collectives == {
    "all-gather": (1, 4 * (32 + 16)),
    "all-reduce": (1, 4 * (8 + 4)),
    "reduce-scatter": (1, 4 * 8),
    "collective-permute": (1, 4 * 8),
  }
  # Of machines with four devices, only the all-reduce joins two. It moves its
  # bytes twice.
  joined = cost.cost_of(program, 1.0, target=target, machine=4)
  more = 2 * 48 * (1 / target.network - 1 / target.interconnect)
  assert joined.seconds - found.seconds == pytest.approx(more)


def test_groups_of_devices_are_read_in_both_forms():
  main = hlo.parse(COLLECTIVES).computations["main"]
  groups = {each.name: each.groups() for each in main}
  assert groups["many"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert groups["sums"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
  assert groups["part"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert groups["one"] == [[0, 1], [1, 0]]
  (total,) = [
    each
    for each in hlo.parse(PROGRAM).computations["main"]
    if each.name == "sum"
  ]
  assert total.groups() == []


def test_gpus_of_several_machines_are_joined_by_a_network():
  assert targets.machine_size("h100:1x1x8") is None
  assert targets.machine_size("h100:2x3x8") == 8
  assert targets.machine_size("v5e:16x16") is None


def test_a_text_that_jax_cannot_read_is_read_from_the_compiler_s_file():
  class Unreadable(Compiled):
    def as_text(self):
      raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

  class Lowered:
    def lower(self, *specs):
      return self

    def compile(self, compiler_options):
      folder = (compiler_options or {}).get("xla_dump_to")
      if folder:
        path = pathlib.Path(folder, "module_0000.jit_f.after_codegen.txt")
        path.write_text(PROGRAM)
      return Unreadable()

  mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
  spec = jax.ShapeDtypeStruct(
    (8, 4), "float32", sharding=jax.NamedSharding(mesh, jax.P())
  )
  target = targets.TARGETS["v6e"]
  program, seconds = cost.compiled(Lowered(), spec, target=target)
  assert cost.cost_of(program, seconds, target=target).kernels == 17


def test_arrays_have_the_bytes_of_their_dtype():
  sizes = [a.size for a in hlo.arrays("(bf16[3,5]{1,0}, s4[3], pred[], u8[0])")]
  assert sizes == [30, 2, 1, 0]


@pytest.mark.parametrize(
  "topology",
  [
    *("v5e", "a100:1x1x1", "", "h100:1x4", "v5e:4", "v5e:"),
    *("v5e:0x4", "v5e:32x32", "v5e:2x2x2", "h100:0x1x8"),  # crashed
  ],
)
def test_an_unknown_topology_is_an_error_that_names_the_known(topology):
  with pytest.raises(UserError, match=r"h100.*v5e"):
    targets.target_of(topology)


def test_a_missing_compiler_is_an_error_that_names_the_extra(monkeypatch):
  monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(UserError, match=r"libtpu.*aot-tpu"):
    targets.TARGETS["v5e"].check_installed()
